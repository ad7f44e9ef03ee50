# shellcheck shell=bash
# Sourced by the job scripts in this folder: what a job does before, around and after the run.
# Site values come from slurm/site.env, or from the file that OCTET_SITE names.

# prepare ROOT: the site's values, and the environment with Octet in it. The job works where it was submitted, so that
# paths in settings mean what they mean on a command line there.
prepare() {
    root="$1"
    read_site "${OCTET_SITE:-$root/slurm/site.env}"
    load_modules
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
    if [ -z "${OCTET_APPTAINER_IMAGE:-}${OCTET_PYXIS_IMAGE:-}" ]; then
        # shellcheck source=scripts/environment.sh
        source "$root/scripts/environment.sh"
        use_environment "$root" # once, here: not by every rank at the same time
    elif [ -z "${OCTET_PYTHON:-}" ]; then
        echo "octet: a container is named and OCTET_PYTHON is not: each rank would make an environment of its own in" \
            "there. Write OCTET_PYTHON=, the path of the python in the image, into site.env." >&2
        exit 2
    fi
    echo "octet: job $(job_number) on $SLURM_JOB_NODELIST, restart ${SLURM_RESTART_COUNT:-0}"
}

# A task of an array has to be called by both of its numbers: the last one has that of the whole array.
job_number() {
    if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then echo "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"; else echo "$SLURM_JOB_ID"; fi
}

read_site() {
    [ -f "$1" ] || { echo "octet: there is no $1, so the cluster's own defaults are used" && return; }
    # shellcheck source=slurm/site.env.example
    source "$1" || true # its last line may be a test that does not hold
    if [ -n "${SBATCH_PARTITION:-}" ] && [ "$SBATCH_PARTITION" != "${SLURM_JOB_PARTITION:-}" ]; then
        echo "octet: $1 says partition $SBATCH_PARTITION, and this job is in ${SLURM_JOB_PARTITION:-none}: sbatch" \
            "reads no file, so write source $1 before it"
    fi
}

load_modules() {
    local module
    for module in ${OCTET_MODULES:-}; do
        module load "$module"
    done
}

# run_step SRUN_OPTION... -- COMMAND...: in the container, if there is one. A rank that ends gives the others a minute
# to say what they miss, and to save.
run_step() {
    local options=(--kill-on-bad-exit=0 --wait=60) inside=()
    while [ "$1" != -- ]; do options+=("$1") && shift; done
    shift
    if [ -n "${OCTET_PYXIS_IMAGE:-}${OCTET_APPTAINER_IMAGE:-}" ]; then
        MASTER_ADDR="$(scontrol show hostnames | head -n 1)" # in there is no scontrol
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

# mounts ARGUMENT...: of a program that runs in the container.
mounts() {
    local mounted="$PWD:$PWD" place
    while read -r place; do
        case ",$mounted," in *",$place:$place,"*) continue ;; esac
        [ ! -e "$place" ] || mounted+=",$place:$place" # what is not here may be inside the image
    done < <(places "$@")
    echo "$mounted"
}

# places ARGUMENT...: the checkout, the caches, and what the arguments and their preset name by an absolute path. A run
# folder may be still to be made: the nearest folder above it that is there.
places() {
    local argument place
    printf '%s\n' "$root" "${HF_HOME:-}" "${OCTET_SCRATCH:-}"
    for argument in "$@"; do
        place="${argument#*=}"
        case "$place" in *.yaml | *.yml) [ ! -f "$place" ] || sed -n 's/^ *[a-z_]*: \(\/.*\)/\1/p' "$place" ;; esac
        case "$argument" in run.dir=/*) until [ -d "$place" ]; do place="$(dirname "$place")"; done ;; esac
        case "$place" in /?*) echo "$place" ;; esac
    done
}

gpus_of_node() {
    echo "${SLURM_GPUS_ON_NODE:-1}"
}

# The model that the settings name, the embedded one by its folder, and what else a server has to know of it, a line each.
model_of() {
    local model
    model="$("${OCTET_PYTHON:-python}" "$root/train.py" --dry-run "$@" | sed -n "/^model:/,/^lora:/{
        s/^  name: //p
        /^  revision: null/d; s/^  revision: '\{0,1\}\([^']*\)'\{0,1\}$/--revision=\1/p
        s/^  trust_remote_code: true/--trust-remote-code/p
    }")" || return
    if [ "${model%%$'\n'*}" = nano ]; then
        model="$root/trainer/model/nano"
        [ -d "$model" ] || model="$(dirname "$root")/model/nano" # of an installed Octet
    fi
    echo "$model"
}

# train_in FOLDER SETTINGS...: a rank for each GPU of each node, or where step_options say. Started again, it goes on in
# the same run folder.
train_in() {
    local folder="$1" asked status=0 options=(--ntasks-per-node="$(gpus_of_node)")
    [ -z "${step_options[*]:-}" ] || options=("${step_options[@]}")
    shift
    asked="${*%%rollout.vllm.urls=*}" # each job has servers of its own
    if [ -n "${OCTET_CHAIN:-}" ] && [ "$(cat "$folder/finished" 2>/dev/null || echo not)" = "$asked" ]; then
        echo "octet: $folder is finished; the rest of the chain has nothing to do"
        return
    fi
    export OCTET_FAILED="$folder/failed" # written by a rank that ends with an error of its own
    rm -f "$OCTET_FAILED"
    run_step "${options[@]}" -- "$root/run_deepspeed.sh" "$@" run.dir="$folder" || status=$?
    [ "$status" != 0 ] || [ ! -d "$folder" ] || echo "$asked" >"$folder/finished"
    go_on_later "$status" "$folder"
}

# The folder that the settings name, last of all those of a preset in a file; or one with the number of the job, which
# stays the same when it is started again.
folder_of() {
    local setting preset="" folder=""
    for setting in "$@"; do
        case "$setting" in
        run.dir=*) folder="${setting#run.dir=}" ;;
        *.yaml | *.yml) preset="${setting#--preset=}" ;;
        esac
    done
    [ -n "$folder" ] || [ ! -f "$preset" ] || folder="$(folder_in "$preset")"
    echo "${folder:-runs/$SLURM_JOB_NAME-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}"
}

# folder_in PRESET: its run.dir. The python that knows YAML may be inside of a container.
folder_in() {
    local folder
    folder="$(sed -n '/^run:/,/^[^ #]/s/^ \{1,\}dir: *//p' "$1" | sed 's/ *#.*//; s/ *$//' | tr -d "\"'")"
    [ "$folder" = null ] || echo "$folder"
}

# go_on_later STATUS FOLDER. 75 is the status of a run that was told to stop and has saved everything. The others are
# tried again a few times: 138 is a run whose signal came before it could listen, 76 one that has lost a rank, 137 a rank
# that was killed and 134 one that NCCL's watchdog has ended; a node may be to blame. It is not when a rank has ended with
# an error of its own: the others, in a collective that it never comes to, are then ended in these ways. Such a job asks
# to be started again; in a chain the next job goes on.
go_on_later() {
    [ "$1" != 134 ] || echo "octet: what NCCL said before it ended a rank is in octet-nccl-*, in the temporary folder" \
        "(TMPDIR) of its node" >&2
    case "$1" in
    75) ask_again "$1" ;;
    76 | 134 | 137 | 138)
        if [ -f "$2/failed" ]; then
            echo "octet: not tried again: $(cat "$2/failed")" >&2
        elif [ "$(lost_before "$2")" -lt 3 ]; then
            job_number >>"$2/lost"
            ask_again "$1"
        fi
        ;;
    esac
    exit "$1"
}

# lost_before FOLDER: how often this job was tried again. SLURM_RESTART_COUNT counts what stopped in good order, too.
lost_before() {
    mkdir -p "$1"
    touch "$1/lost"
    grep -cFx "$(job_number)" "$1/lost" || true
}

ask_again() {
    [ -z "${OCTET_CHAIN:-}" ] || exit "$1"
    echo "octet: asking for job $(job_number) to be started again"
    scontrol requeue "$(job_number)" ||
        echo "octet: this cluster does not start jobs again; submit the same command with the same run.dir" >&2
}
