#!/usr/bin/env bash
# Starts run_dpo_ddp.py, one process per GPU of this machine; without a GPU, CPU processes. What it
# says goes to the terminal and to logs/dpo_ddp_DATE_TIME.out and .err.
#
# Usage: ./scripts/run_dpo_ddp_local.sh [NGPUS=all] [options of run_dpo_ddp.py ...]
#   ./scripts/run_dpo_ddp_local.sh 2 --config configs/run_dpo_ddp_quickstart.yaml
#   ./scripts/run_dpo_ddp_local.sh 4 --train_data pairs.json --output_dir outputs/dpo_ddp
# Several machines: the same line on each, with NNODES, NODE_RANK (0 on the first), MASTER_ADDR (the
# first one's name) and, if it is not 29500, MASTER_PORT set.
set -euo pipefail

die() {
    printf 'run_dpo_ddp_local.sh: %s\n' "$1" >&2
    exit 2
}

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '2,/^set /{s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
    exit 0
fi
cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
gpus=0
if ! [[ " $* " =~ device[\ =]cpu\ |no_cuda(=[Tt]rue)?\  ]]; then
    gpus=$(python -c 'import torch; print(torch.accelerator.device_count())')
fi
most=$((gpus > 0 ? gpus : cores))
ngpus=$((gpus > 0 ? gpus : cores < 2 ? cores : 2))
if [[ $# -gt 0 && $1 != --* && $1 != *=* ]]; then # an option (--lr=1, lr=1) is no number
    ngpus=$1
    shift
fi
[[ $ngpus =~ ^[1-9][0-9]{0,3}$ ]] || die "NGPUS must be a whole number from 1, not '$ngpus'"
((ngpus <= most)) || die "NGPUS is $ngpus but here are $gpus GPU(s), $cores CPU core(s): give $most"

# One machine: on any free port, so that two runs do not collide; the host's name need not resolve.
where=(--standalone --local-addr=127.0.0.1)
log=logs/dpo_ddp_$(date +%Y%m%d_%H%M%S)
if [[ ${NNODES:-1} != 1 ]]; then
    port=29500
    [[ -z ${SLURM_JOB_ID:-} ]] || port=$((10000 + SLURM_JOB_ID % 20000)) # each job has its own
    where=(--nnodes="$NNODES" --node_rank="${NODE_RANK:?with NNODES set it, too}"
        --master_addr="${MASTER_ADDR:?with NNODES set it, too}"
        --master_port="${MASTER_PORT:-$port}")
    log+=.node$NODE_RANK
fi
mkdir -p logs
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # or restarted processes look for the dead ones
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120} # torchrun would say 30
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((cores + ngpus - 1) / ngpus))} # torchrun would say 1
signals=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1
[[ -z $(trap -p HUP) ]] || signals=${signals/SIGHUP,/} # ignored, as nohup has it: the run goes on
# SIGUSR1 (a batch queue's warning) reaches the processes, which then have 120 s to save. tee ignores
# signals: it ends when the last process has closed its output.
exec torchrun "${where[@]}" --nproc_per_node="$ngpus" \
    --signals-to-handle="$signals" \
    "$(dirname -- "${BASH_SOURCE[0]}")/../run_dpo_ddp.py" "$@" \
    > >(trap '' TERM INT HUP QUIT USR1 PIPE && exec tee -a "$log.out") \
    2> >(trap '' TERM INT HUP QUIT USR1 PIPE && exec tee -a "$log.err" >&2)
