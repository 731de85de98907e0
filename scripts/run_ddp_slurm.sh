#!/usr/bin/env bash
# Runs a script of this repository on several SLURM nodes (here 2 nodes x 8 GPUs) and requeues it
# when the time limit is near.
#
# Usage (from the root of the repository):
#   sbatch scripts/run_ddp_slurm.sh [SCRIPT=train_ddp.py] [options of the script ...]
#   sbatch --nodes=4 --time=12:00:00 scripts/run_ddp_slurm.sh train_ddp.py --batch_size=128
#
# Options of sbatch on the command line win over the #SBATCH lines; set account and partition there.
#
# srun starts one process per GPU, without torchrun, so that SLURM's signals reach them: SIGUSR1,
# 300 s before the time limit. They write a checkpoint and exit with 0. This file then requeues the
# job, and the same command goes on from the checkpoint. A failed job is not requeued.
#
#SBATCH --job-name=ddp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out
set -euo pipefail

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '2,/^#SBATCH/{/^#SBATCH/!s/^# \{0,1\}//p;}' "$0"
    exit 0
fi
: "${SLURM_JOB_ID:?not in a SLURM job: sbatch scripts/run_ddp_slurm.sh}"
script=train_ddp.py # in the folder of sbatch: SLURM runs a copy of this file from elsewhere
if [[ ${1:-} == *.py ]]; then
    script=$1
    shift
fi

# The first node of the job meets the others. Set here, whatever the submitting shell had: a
# requeued job may get other nodes. Ports 10000-29999 lie below those the kernel hands out.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts%%$'\n'*}
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))

# A requeued job goes on; --fresh was meant for its first start.
if ((${SLURM_RESTART_COUNT:-0} > 0)); then
    set -- "$@" --fresh=False
fi

# --mpi=none: no PMI variables that could contradict SLURM's own. All GPUs of a node stay visible to
# each of its processes (no --gpus-per-task), so that they can reach one another directly.
log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
srun --mpi=none --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
    python "$script" "$@" 2>&1 | tee "$log" || status=$?
if ((status == 0)) && grep -q 'stopped by SIGUSR1' "$log"; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
