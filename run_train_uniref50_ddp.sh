#!/usr/bin/env bash
# Checks the machine, the config and the data, then starts run_train_uniref50_ddp.py, one process
# per GPU, with the output on the terminal and in a log file.
#
# Usage: ./run_train_uniref50_ddp.sh [options] [options of run_train_uniref50_ddp.py ...]
#
#   -w, --work-dir DIR   checkpoints, metrics, samples, logs (default: the config's, else
#                        ./experiments_ddp); a run found there is resumed
#   -c, --config FILE    YAML or JSON (default: configs/config_uniref50_ddp.yaml)
#   -d, --datafile PATH  folder made by --prepare, FASTA, FASTA.gz, text, processed_uniref50.pt, or
#                        markov:... (default: the config's, else ./input_data/processed_uniref50.pt)
#   -p, --project NAME   wandb project
#   -n, --name NAME      wandb name and name of the log (default: ddp_DATE_TIME; a resumed run
#                        keeps its wandb name)
#   -s, --seed N         seed
#   -m, --method NAME    sampler: rigorous or simple
#       --fresh          start anew: what the work dir holds is moved aside, to DIR.old-DATE-TIME
#       --gpus N         processes on this machine (default: one per visible GPU, 2 without a GPU)
#       --yes            accepted, with no effect: nothing is asked
#   -h, --help           this text
#
# Values are written --name VALUE or --name=VALUE. What is not given is left to the config. All other
# options, and everything after --, go to run_train_uniref50_ddp.py as they are.
#
# Examples:
#   ./run_train_uniref50_ddp.sh --config configs/config_uniref50_quickstart.yaml
#   ./run_train_uniref50_ddp.sh --datafile ./input_data/uniref50 --project proteins --name first --gpus 4
#   ./run_train_uniref50_ddp.sh -d ./input_data/uniref50 -m simple --fresh --batch_size=8
#
# Several machines: run the same line on each, with these variables set.
#   NNODES       number of machines (default 1)
#   NODE_RANK    0 on the first machine, 1 on the second, ...
#   MASTER_ADDR  name or address of the first machine
#   MASTER_PORT  a port that is free there (default 29500)
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=HOST0 ./run_train_uniref50_ddp.sh --datafile ./input_data/uniref50
# SKIP_CHECK=1 leaves out the check by test_ddp_setup.py --quick.
#
# The exit status is torchrun's: 0 when all processes succeeded, 1 when one failed or the run was
# stopped by a signal. What is found wrong before the start: status 2 and what to do about it.
set -euo pipefail

die() {
    printf 'run_train_uniref50_ddp.sh: %s\n' "$1" >&2
    exit 2
}

usage() { sed -n '2,/^set /{s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"; }

# Prints the value of a key of the config, nothing where it is missing or null. A hint: it is the script
# that reads the file. In YAML a key is at the top level, datafile also in a section.
config_value() {
    local indent='' value
    [[ $1 != datafile ]] || indent='[[:space:]]*'
    value=$(sed -nE -e "s/^$indent$1[[:space:]]*:[[:space:]]*(\"([^\"]*)\"|'([^']*)'|([^\"'#][^#]*)).*/\2\3\4/p" \
        -e "s/^.*\"$1\"[[:space:]]*:[[:space:]]*\"([^\"]*)\".*/\1/p" "$config" | head -n 1) # the second: JSON
    value=${value%"${value##*[![:space:]]}"}
    [[ $value == null || $value == '~' ]] || printf '%s' "$value"
}

# nproc obeys OMP_NUM_THREADS, which says nothing about the number of cores.
count_cores() {
    env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc 2>/dev/null || getconf _NPROCESSORS_ONLN
}

wants_cpu() {
    local previous='' arg
    for arg in "$@"; do
        case $arg in
            --device=cpu | device=cpu) return 0 ;;
            cpu) [[ $previous == --device ]] && return 0 ;;
        esac
        previous=$arg
    done
    return 1
}

work_dir='' config='' datafile='' wandb_project='' wandb_name='' seed='' sampling_method='' gpus='' fresh='' sampling=''
rest=()
previous='' # of the options that are passed on
while (($#)); do
    word=$1
    shift
    case ${word%%=*} in
        -w | --work-dir | --work_dir | --output-dir | --output_dir) key=work_dir ;;
        -c | --config) key=config ;;
        -d | --datafile) key=datafile ;;
        -p | --project | --wandb-project | --wandb_project) key=wandb_project ;;
        -n | --name | --wandb-name | --wandb_name) key=wandb_name ;;
        -s | --seed) key=seed ;;
        -m | --method | --sampling-method | --sampling_method) key=sampling_method ;;
        --gpus) key=gpus ;;
        --fresh | --yes | -y | -h | --help) key=${word%%=*} ;;
        --) key=-- ;;
        --prepare) die "prepare data without this file: python run_train_uniref50_ddp.py --prepare IN OUT" ;;
        --sample) key='' sampling=1 ;;
        *) key='' ;;
    esac
    case $key in
        --fresh)
            case ${word#--fresh} in
                '' | =[Tt]rue | =1 | =yes) fresh=1 ;;
                =[Ff]alse | =0 | =no) fresh='' ;;
                *) die "--fresh is True or False, not '${word#*=}'" ;;
            esac ;;
        --yes | -y) ;;
        -h | --help) usage && exit 0 ;;
        --)
            rest+=("$@")
            break ;;
        '')
            # the script knows its options; a lone word is the value of the option before it
            if [[ $word != --* && $word != *=* && ($word == -* || $previous != --* || $previous == *=*) ]]; then
                [[ $word =~ ^[0-9]+$ ]] && die "unexpected '$word': the number of processes is --gpus $word"
                die "unexpected '$word'; see --help"
            fi
            rest+=("$word") ;;
        *)
            if [[ $word == *=* ]]; then
                value=${word#*=}
            else
                value=${1:-}
                [[ -n $value && $value != -* ]] || die "$word needs a value"
                shift
            fi
            [[ -n $value ]] || die "$word needs a value"
            printf -v "$key" %s "$value" ;;
    esac
    previous=$word
done

case $sampling_method in
    '' | rigorous | simple) ;;
    *) die "--method must be rigorous or simple, not '$sampling_method'" ;;
esac
[[ -z $gpus || $gpus =~ ^[1-9][0-9]{0,3}$ ]] || die "--gpus must be a whole number from 1, not '$gpus'"
[[ -z $fresh || -z $sampling ]] || die "--fresh would move aside the run that --sample takes its weights from"
nnodes=${NNODES:-1}
node_rank=${NODE_RANK:-0}
[[ $nnodes =~ ^[1-9][0-9]{0,4}$ ]] || die "NNODES must be a whole number from 1, not '$nnodes'"
if ! [[ $node_rank =~ ^(0|[1-9][0-9]{0,4})$ ]] || ((node_rank >= nnodes)); then
    die "NODE_RANK must be from 0 to NNODES - 1 = $((nnodes - 1)), not '$node_rank'"
fi
if ((nnodes == 1)); then
    where=(--standalone) # a free port: two runs on one machine do not collide
else
    [[ -n ${NODE_RANK:-} ]] || die "with NNODES=$nnodes set NODE_RANK too: 0 to $((nnodes - 1))"
    [[ -n ${MASTER_ADDR:-} ]] || die "with NNODES=$nnodes set MASTER_ADDR too: the first machine"
    where=(--nnodes="$nnodes" --node_rank="$node_rank"
        --master_addr="$MASTER_ADDR" --master_port="${MASTER_PORT:-29500}")
fi

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" >/dev/null && pwd -P)
if [[ -z $config ]]; then
    config=configs/config_uniref50_ddp.yaml
    [[ -f $config ]] || config=$here/$config
fi
[[ -f $config ]] || die "no config file $config; give one with --config FILE"

data=${datafile:-$(config_value datafile)}
data=${data:-./input_data/processed_uniref50.pt}
if [[ ! -e $data && $data != markov:* && (-n $datafile || -z $sampling) ]]; then
    die "no data file $data. UniRef50 is published at
    https://ftp.uniprot.org/pub/databases/uniprot/uniref/uniref50/uniref50.fasta.gz
Prepare it once, then name the result:
    python run_train_uniref50_ddp.py --prepare uniref50.fasta.gz ./input_data/uniref50
    ./run_train_uniref50_ddp.sh --datafile ./input_data/uniref50"
fi

command -v python >/dev/null || die "no python on PATH; activate the environment that has torch"
command -v torchrun >/dev/null || die "no torchrun on PATH; activate the environment that has torch"
visible=$(python -c 'import torch; print(torch.cuda.device_count() or torch.xpu.device_count())' 2>/dev/null) ||
    die "python on PATH cannot import torch; activate the environment that has it, or pip install -r requirements.txt"
device=auto
if wants_cpu ${rest[@]+"${rest[@]}"}; then
    visible=0 device=cpu
fi
if ((visible > 0)); then
    gpus=${gpus:-$visible}
    ((gpus <= visible)) || die "--gpus is $gpus but $visible GPU(s) are visible; try --gpus $visible"
else
    cores=$(count_cores)
    ((${gpus:-1} <= cores)) || die "--gpus is $gpus but there is no GPU and $cores CPU core(s); try --gpus $cores"
    gpus=${gpus:-2}
fi

options=(--config="$config")
folder=${work_dir:-$(config_value work_dir)}
folder=${folder:-$(config_value output_dir)}
folder=${folder%/}
if [[ -n $work_dir || -z $folder ]]; then
    folder=${folder:-./experiments_ddp}
    options+=(--work_dir="$folder")
fi
name=${wandb_name:-ddp_$(date +%Y%m%d_%H%M%S)}
suffix=''
((nnodes == 1)) || suffix=.node$node_rank
log=$folder/logs/${name//\//_}$suffix.log

open_log() {
    { mkdir -p "$folder/logs" && : >>"$log"; } 2>/dev/null || die "cannot write $log; give another --work-dir"
}

# A check of this machine alone, whatever started this file: no launcher's variables.
check=''
if [[ ${SKIP_CHECK:-} != 1 ]]; then
    launchers=(-u RANK -u WORLD_SIZE -u LOCAL_RANK -u LOCAL_WORLD_SIZE -u MASTER_ADDR -u MASTER_PORT
        -u SLURM_PROCID -u OMPI_COMM_WORLD_RANK -u PMI_RANK -u PALS_RANKID)
    if ! check=$(env "${launchers[@]}" python "$here/test_ddp_setup.py" --quick \
        --nproc="$gpus" --device="$device" 2>&1); then
        open_log
        printf '%s\n' "$check" | tee -a "$log" >&2
        die "test_ddp_setup.py --quick failed, see above and $log; SKIP_CHECK=1 starts all the same"
    fi
fi

# Here and not in the script, which would move the log of this run away with the old one.
if [[ -n $fresh && $node_rank == 0 && -n $(ls -A "$folder" 2>/dev/null) ]]; then
    aside=$folder.old-$(date +%Y%m%d-%H%M%S)
    [[ ! -e $aside ]] || aside+=.$$ # twice in a second
    mv -- "$folder" "$aside" || die "--fresh cannot move $folder aside; give another --work-dir"
    printf 'run_train_uniref50_ddp.sh: --fresh: what %s held was moved to %s\n' "$folder" "$aside"
fi
open_log

[[ -z $datafile ]] || options+=(--datafile="$datafile")
[[ -z $wandb_project ]] || options+=(--wandb_project="$wandb_project")
# a resumed run keeps its name
if [[ -n $wandb_name || (-z $(config_value wandb_name) && -z $(compgen -G "$folder/*.pt")) ]]; then
    options+=(--wandb_name="$name")
fi
[[ -z $seed ]] || options+=(--seed="$seed")
[[ -z $sampling_method ]] || options+=(--sampling_method="$sampling_method")
options+=(${rest[@]+"${rest[@]}"})

# Without this, processes that torchrun restarts can hang: they find the addresses of the dead ones.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# torchrun would give every process one CPU thread.
threads=$(($(count_cores) / gpus))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
# SIGUSR1 reaches the processes instead of killing torchrun; after any of these signals they have
# 120 s to write a checkpoint (a variable, since the torchrun of torch 2.10 has no option for it).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120
command=(torchrun "${where[@]}" --nproc_per_node="$gpus"
    "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    "$here/run_train_uniref50_ddp.py" "${options[@]}")
[[ -z $check ]] || printf '%s\n' "$check" >>"$log"
printf '%q ' "${command[@]}" >>"$log"
printf '\n' >>"$log"
printf 'run_train_uniref50_ddp.sh: %s processes, config %s, data %s, log %s\n' "$gpus" "$config" "$data" "$log"
# exec: this process becomes torchrun, which gets its signals and gives its exit status. tee outlives
# the signals, and a terminal that is gone, until the last process has closed its output.
exec "${command[@]}" > >(trap '' TERM INT HUP QUIT USR1 PIPE && exec tee -a "$log") 2>&1
