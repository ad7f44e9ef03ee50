# shellcheck shell=bash
# Functions of the job scripts in this folder, which source this file.
# The values of the site come from slurm/site.env, or from the file OCTET_SITE.

# prepare ROOT: read the values of the site, and activate the environment with Octet. The job stays in the folder in which
# it was submitted, so that relative paths in settings mean the same as on a command line there.
prepare() {
    local module
    root="$1"
    set +u # the files of a cluster may use variables that are not set
    read_site "${OCTET_SITE:-$root/slurm/site.env}"
    for module in ${OCTET_MODULES:-}; do module load "$module"; done
    set -u
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
    # shellcheck source=scripts/environment.sh
    source "$root/scripts/environment.sh"
    if [ -z "${OCTET_APPTAINER_IMAGE:-}${OCTET_PYXIS_IMAGE:-}" ]; then
        use_environment "$root" # here, and not in every rank: each would wait for the lock of the one before
        export OCTET_PYTHON="${OCTET_PYTHON:-$(command -v python)}"
    elif [ -z "${OCTET_PYTHON:-}" ]; then
        echo "octet: a container image is set, but OCTET_PYTHON is not, so each rank would create an environment of its" \
            "own in the container. Set OCTET_PYTHON in site.env to the path of the python in the image." >&2
        exit 2
    fi
    echo "octet: job $(job_number) on $SLURM_JOB_NODELIST, restart ${SLURM_RESTART_COUNT:-0}"
}

# Print the job ID. For a task of an array it is ARRAY_TASK: SLURM_JOB_ID of the last task is the ID of the whole array.
job_number() {
    if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then echo "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"; else echo "$SLURM_JOB_ID"; fi
}

read_site() {
    [ -f "$1" ] || { echo "octet: $1 does not exist, so the defaults of the cluster are used" && return; }
    trap 'echo "octet: the site.env of this job ends the shell, as exit does: remove that line" >&2; exit 2' EXIT
    # shellcheck source=slurm/site.env.example
    source "$1" || true # its last command may fail
    [[ "$(trap -p EXIT)" != *"octet: the site.env"* ]] || trap - EXIT # unless the file has set its own
    if [ -n "${SBATCH_PARTITION:-}" ] && [[ ",$SBATCH_PARTITION," != *",${SLURM_JOB_PARTITION:-},"* ]]; then
        echo "octet: $1 sets partition $SBATCH_PARTITION, but this job is in ${SLURM_JOB_PARTITION:-none}: sbatch does" \
            "not read the file, so run source $1 before sbatch"
    fi
}

# run_step SRUN_OPTION... -- COMMAND...: run a command with srun, in the container if there is one. After a rank has ended
# the others have a minute to report what they wait for, and to save. They have the environment of the job, even if the
# job has none of the user's (sbatch --export=NONE, which some clusters set).
run_step() {
    local options=(--export=ALL --kill-on-bad-exit=0 --wait=60) inside=()
    while [ "$1" != -- ]; do options+=("$1") && shift; done
    shift
    if [ -n "${OCTET_PYXIS_IMAGE:-}${OCTET_APPTAINER_IMAGE:-}" ]; then
        MASTER_ADDR="$(scontrol show hostnames | head -n 1)" # the container has no scontrol
        export MASTER_ADDR
    fi
    if [ -n "${OCTET_PYXIS_IMAGE:-}" ]; then
        options+=(--container-image="$OCTET_PYXIS_IMAGE" --container-workdir="$PWD")
        options+=(--container-mounts="$(mounts "${@:2}")")
    elif [ -n "${OCTET_APPTAINER_IMAGE:-}" ]; then
        inside=(apptainer exec --nv --bind "$(mounts "${@:2}")" --pwd "$PWD" "$OCTET_APPTAINER_IMAGE")
    fi
    srun "${options[@]}" ${inside[@]+"${inside[@]}"} "$@"
}

# mounts ARGUMENT...: print the mounts that a program with these arguments needs in the container.
mounts() {
    local mounted="$PWD:$PWD" place
    while read -r place; do
        case "$place" in *.py:*) place="$(dirname "$place")" ;; esac # code may import its neighbours
        case ",$mounted," in *",$place:$place,"*) continue ;; esac
        [ ! -e "$place" ] || mounted+=",$place:$place" # what does not exist here may be inside the image
    done < <(places "$@")
    echo "$mounted"
}

# places ARGUMENT...: print the checkout, the caches, and the absolute paths in the arguments and in their preset. For a
# run folder that does not exist yet, print the nearest existing parent.
places() {
    local argument place
    printf '%s\n' "$root" "${HF_HOME:-}" "${OCTET_SCRATCH:-}"
    for argument in "$@"; do
        place="${argument#*=}"
        case "$place" in \~/*) place=~/"${place#\~/}" ;; esac # bash leaves it after an equals sign
        case "$place" in
            *.yaml | *.yml) [ ! -f "$place" ] || one_per_line "$place" | sed ":a; s/^\([^\"']*\) #.*/\1/; ta; s/ *\$//" | absolute ;;
            \[* | \{*) echo "$place" | tr '[]{},' '\n' | absolute ;;
        esac
        case "$argument" in run.dir=/*) until [ -d "$place" ]; do place="$(dirname "$place")"; done ;; esac
        case "$place" in /?*) echo "$place" ;; esac
    done
}

# absolute: print the absolute paths among the settings of the standard input, one per line.
absolute() {
    sed -n "s/^[ -]*\([a-z_]*: *\)\{0,1\}[\"']\{0,1\}\(\/[^\"']*\).*/\2/p"
}

# one_per_line PRESET: print a file with each setting of `{a: 1, b: 2}`, which may be several lines, on its own.
one_per_line() {
    tr -d '\r' <"$1" | sed '/[:,] *[[{][^]}]*$/,/[]}]/s/[][{},]/\n  /g; /[:,] *[[{]/s/[][{},]/\n  /g'
}

gpus_of_node() {
    echo "${SLURM_GPUS_ON_NODE:-1}"
}

# model_of SETTING...: print the model, for the embedded one its folder, and then the options that a server needs to load
# it, one per line. OCTET_PYTHON may be inside a container.
model_of() {
    local model
    model="$(run_step --nodes=1 --ntasks=1 -- "${OCTET_PYTHON:-python}" "$root/train.py" --dry-run "$@" | sed -n "/^model:/,/^lora:/{
        s/^  name: //p
        /^  revision: null/d; s/^  revision: '\{0,1\}\([^']*\)'\{0,1\}$/--revision=\1/p
        s/^  trust_remote_code: true/--trust-remote-code/p
    }")" || return
    [ "${model%%$'\n'*}" != nano ] || model="$(package)/model/nano"
    echo "$model"
}

# Print the folder of the package, in a checkout or of an installed Octet.
package() {
    if [ -d "$root/trainer/model" ]; then echo "$root/trainer"; else dirname "$root"; fi
}

# train_in FOLDER SETTING...: train with one rank per GPU of each node, or as step_options say. After a restart it
# continues in the same run folder.
train_in() {
    local folder="$1" settings status=0 options=(--ntasks-per-node="$(gpus_of_node)")
    [ -z "${step_options[*]:-}" ] || options=("${step_options[@]}")
    shift
    settings="${*%%rollout.vllm.urls=*}" # each job has its own servers
    if [ -n "${OCTET_CHAIN:-}" ] && [ "$(cat "$folder/finished" 2>/dev/null || echo not)" = "$settings" ]; then
        echo "octet: $folder is finished; this job of the chain has nothing to do"
        return
    fi
    export OCTET_FAILED="$folder/failed" # written by a rank that fails by itself
    rm -f "$OCTET_FAILED"
    run_step "${options[@]}" -- "$root/run_deepspeed.sh" "$@" run.dir="$folder" || status=$?
    case "$status" in # 3 and 4: finished, and the verdict is not "learned" (run.strict_verdict)
    0 | 3 | 4) [ ! -d "$folder" ] || echo "$settings" >"$folder/finished" ;;
    esac
    exit_with "$status" "$folder"
}

# share COUNT GPUS NODE...: print the srun options of a step on so many nodes, with one task per GPU. With --mem=0 the
# steps share the memory of the job: by default the first one takes all of it, and the second waits for ever.
share() {
    local number="$1" each="$2" named
    shift 2
    named="$(IFS=, && echo "$*")"
    echo "--exact --mem=0 --nodes=$number --nodelist=$named --ntasks-per-node=$each --gpus-per-node=$each"
}

# train_beside_servers FOLDER SETTING...: run vLLM servers on some GPUs, and train on the rest. There is one server per GPU:
# on the last OCTET_VLLM_NODES (1) of several nodes, or on the last OCTET_VLLM_GPUS (1) GPUs of a single node.
train_beside_servers() {
    local folder="$1" gpus nodes count each rest trainers servers port urls=() node gpu modules words model
    local server_options step_options
    shift
    gpus="$(gpus_of_node)"
    mapfile -t nodes < <(scontrol show hostnames)
    if [ "${#nodes[@]}" -gt 1 ]; then
        count="${OCTET_VLLM_NODES:-1}" each="$gpus" rest="$gpus"
        trainers=("${nodes[@]::${#nodes[@]}-count}") servers=("${nodes[@]: -count}")
    else
        each="${OCTET_VLLM_GPUS:-1}" rest=$((gpus - ${OCTET_VLLM_GPUS:-1}))
        trainers=("${nodes[0]}") servers=("${nodes[0]}")
    fi
    [ "${#trainers[@]}" -gt 0 ] && [ "$rest" -gt 0 ] || { echo "octet: no GPU is left to train on" >&2 && exit 2; }
    [ "${count:-1}" -gt 0 ] && [ "$each" -gt 0 ] || { echo "octet: no GPU is left to sample on" >&2 && exit 2; }

    # Jobs on the same node have job IDs close to each other, so each ID gets 16 ports.
    port=$((30000 + 16 * SLURM_JOB_ID % 2000))
    for node in "${servers[@]}"; do
        for ((gpu = 0; gpu < each; gpu++)); do urls+=("http://$node:$((port + gpu))"); done
    done
    set -- "$@" rollout.engine=vllm_server rollout.vllm.start=false rollout.vllm.urls="$(IFS=, && echo "${urls[*]}")"
    read -r -a server_options <<<"$(share "${#servers[@]}" "$each" "${servers[@]}")"
    read -r -a step_options <<<"$(share "${#trainers[@]}" "$rest" "${trainers[@]}")"

    # The servers write into the run folder. The run ends when a server ends, and Slurm ends the servers when the run ends.
    mkdir -p "$folder"
    modules="$(package)/rollout/vllm/server_modules"
    # The servers ask for a key on every route. srun passes it on in the environment; no file or command line has it.
    export VLLM_API_KEY="${VLLM_API_KEY:-$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')}"
    words="$(model_of "$@")" || exit # wrong settings end the job here
    mapfile -t model <<<"$words"
    {
        run_step "${server_options[@]}" --kill-on-bad-exit=1 --output="$folder/vllm-%t.log" -- \
            "$root/slurm/vllm_server.sh" "${model[0]}" "$port" "$modules" "${model[@]:1}" || true
        echo "octet: a vLLM server has ended; see $folder/vllm-*.log"
        scancel --signal=TERM "$(job_number)"
    } &
    watcher=$!
    trap 'kill "$watcher" 2>/dev/null || true' EXIT
    echo "octet: ${#urls[@]} vLLM servers on ${servers[*]}, ranks on ${trainers[*]}"
    train_in "$folder" "$@"
}

# folder_of SETTING...: print the run folder: run.dir of the settings or the folder of --resume, else run.dir of their
# preset file, else a folder with the job ID, which stays the same after a requeue.
folder_of() {
    local setting before="" preset="" folder=""
    for setting in "$@"; do
        case "$setting" in
        run.dir=*) folder="$(unquoted <<<"${setting#run.dir=}")" ;;
        --resume=?*) folder="${setting#--resume=}" ;;
        --preset=*) preset="${setting#--preset=}" ;;
        -*) ;;
        *=*) [ "$before" != --resume ] || [ ! -d "$setting" ] || folder="$setting" ;;
        *) [ "$before" != --resume ] || folder="$setting" ;;
        esac
        [ "$before" != --preset ] || preset="$setting"
        before="$setting"
    done
    case "$preset" in \~/*) preset=~/"${preset#\~/}" ;; esac # bash leaves it after an equals sign
    [ -n "$folder" ] || [ ! -f "$preset" ] || folder="$(folder_in "$preset")"
    folder="${folder:-runs/$SLURM_JOB_NAME-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}"
    case "$folder" in \~/*) folder=~/"${folder#\~/}" ;; esac # as above
    echo "$folder"
}

# folder_in PRESET: print its run.dir. The python that could parse the YAML may be inside a container.
folder_in() {
    local folder
    folder="$(one_per_line "$1" | sed -n '/^run:/,/^[^ #]/s/^ \{1,\}dir: *//p' | sed -E "/^[\"']/!s/(^| )#.*//; s/ *\$//" | unquoted)"
    [ "$folder" = null ] || echo "$folder"
}

# unquoted: print a value of YAML without the quotes around it, and what follows these, as a path that YAML reads as text.
# One with escapes stays as it is.
unquoted() {
    sed -E "/^[\"']/!b
        s/^\"([^\"\\]+)\".*/\1/; t path
        s/^'(([^']|'')+)'.*/\1/; t single; b
        :single; s/''/'/g
        :path; /^[/~]/!s/^/.\//"
}

# exit_with STATUS FOLDER: requeue the job if that may help, and exit. In a chain the next job continues instead.
#   75   the run was told to stop, and has saved everything
#   138  the signal to stop came before the run could handle it
#   76   the run has lost a rank
#   137  a rank was killed
#   134  NCCL's watchdog has aborted a rank
# After the last four a node may be to blame, so the job is requeued up to three times; but not if a rank has failed by
# itself. The other ranks, which wait for it in a collective, are then ended in one of these ways, too.
exit_with() {
    case "$1" in
    75) requeue "$1" ;;
    76 | 134 | 137 | 138)
        if [ -f "$2/failed" ]; then
            echo "octet: not requeued: $(cat "$2/failed")" >&2
        elif [ "$(lost_before "$2")" -lt 3 ]; then
            job_number >>"$2/lost"
            requeue "$1"
        fi
        ;;
    esac
    exit "$1"
}

# lost_before FOLDER: print how often this job was requeued after a loss. SLURM_RESTART_COUNT also counts regular stops.
lost_before() {
    mkdir -p "$1"
    touch "$1/lost"
    grep -cFx "$(job_number)" "$1/lost" || true
}

requeue() {
    [ -z "${OCTET_CHAIN:-}" ] || exit "$1"
    echo "octet: requeueing job $(job_number)"
    scontrol requeue "$(job_number)" ||
        echo "octet: this cluster does not requeue jobs; submit the same command with the same run.dir" >&2
}
