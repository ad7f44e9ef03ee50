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
    source "$1"
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
    if [ -n "${OCTET_PYXIS_IMAGE:-}" ]; then
        options+=(--container-image="$OCTET_PYXIS_IMAGE" --container-mounts="$(mounts)" --container-workdir="$PWD")
    elif [ -n "${OCTET_APPTAINER_IMAGE:-}" ]; then
        inside=(apptainer exec --nv --bind "$(mounts)" --pwd "$PWD" "$OCTET_APPTAINER_IMAGE")
        MASTER_ADDR="$(scontrol show hostnames | head -n 1)" # in there is no scontrol
        export MASTER_ADDR
    fi
    srun "${options[@]}" ${inside[@]+"${inside[@]}"} "$@"
}

mounts() {
    local mounted="$PWD:$PWD" place
    for place in "$root" "${HF_HOME:-}" "${OCTET_SCRATCH:-}"; do
        case ",$mounted," in *",$place:$place,"*) continue ;; esac
        [ -z "$place" ] || mounted+=",$place:$place"
    done
    echo "$mounted"
}

gpus_of_node() {
    echo "${SLURM_GPUS_ON_NODE:-1}"
}

# The model that the settings name; the embedded one by its folder.
model_of() {
    local name
    name="$("${OCTET_PYTHON:-python}" "$root/train.py" --dry-run "$@" | sed -n '/^model:/,/^  name:/s/^  name: //p')"
    [ "$name" != nano ] || name="$root/trainer/nano"
    echo "$name"
}

# train_in FOLDER SETTINGS...: a rank for each GPU of each node, or where step_options say. Started again, it goes on in
# the same run folder.
train_in() {
    local folder="$1" status=0 options=(--ntasks-per-node="$(gpus_of_node)")
    [ -z "${step_options[*]:-}" ] || options=("${step_options[@]}")
    shift
    if [ -n "${OCTET_CHAIN:-}" ] && [ -f "$folder/finished" ]; then
        echo "octet: $folder is finished; the rest of the chain has nothing to do"
        return
    fi
    run_step "${options[@]}" -- "$root/run_deepspeed.sh" "$@" run.dir="$folder" || status=$?
    [ "$status" != 0 ] || [ ! -d "$folder" ] || touch "$folder/finished"
    go_on_later "$status"
}

# The folder that the settings name, or one with the number of the job, which stays the same when it is started again.
folder_of() {
    local setting folder="runs/$SLURM_JOB_NAME-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}"
    for setting in "$@"; do
        case "$setting" in run.dir=*) folder="${setting#run.dir=}" ;; esac
    done
    echo "$folder"
}

# 75 is the status of a run that was told to stop and has saved everything. The others are tried again a few times: 138
# is a run whose signal came before it could listen, 76 one that has lost a rank, 137 a rank that was killed and 134 one
# that NCCL's watchdog has ended; a node may be to blame. Such a job asks to be started again; in a chain the next job
# goes on.
go_on_later() {
    [ "$1" != 134 ] || echo "octet: what NCCL said before it ended a rank is in octet-nccl-*, in /tmp of its node" >&2
    case "$1" in
    75) ask_again "$1" ;;
    76 | 134 | 137 | 138) [ "${SLURM_RESTART_COUNT:-0}" -ge 3 ] || ask_again "$1" ;;
    esac
    exit "$1"
}

ask_again() {
    [ -z "${OCTET_CHAIN:-}" ] || exit "$1"
    echo "octet: asking for job $(job_number) to be started again"
    scontrol requeue "$(job_number)" ||
        echo "octet: this cluster does not start jobs again; submit the same command with the same run.dir" >&2
}
