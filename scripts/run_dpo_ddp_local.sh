#!/usr/bin/env bash
# Starts run_dpo_ddp.py, one process per GPU of this machine; without a GPU, CPU processes. What it
# says goes to the terminal and to logs/dpo_ddp_DATE_TIME.out and .err.
#
# Usage: ./scripts/run_dpo_ddp_local.sh [NGPUS=all, without a GPU 2] [options of run_dpo_ddp.py ...]
#   ./scripts/run_dpo_ddp_local.sh 2 --config configs/run_dpo_ddp_quickstart.yaml
#   ./scripts/run_dpo_ddp_local.sh 4 --train_data pairs.json --output_dir outputs/dpo_ddp
# Several machines: the same line on each, with NNODES, NODE_RANK (0 on the first), MASTER_ADDR (the
# first one's name) and perhaps MASTER_PORT set (else 29500, in a SLURM job a port of its own).
set -euo pipefail

here=$(dirname -- "${BASH_SOURCE[0]}")
# shellcheck source=scripts/start_torchrun.sh
source "$here/start_torchrun.sh"

[[ ${1:-} != --help && ${1:-} != -h ]] || show_usage
count_devices "$@"
ngpus=$((gpus > 0 ? gpus : cores < 2 ? cores : 2))
if [[ $# -gt 0 && $1 != --* && $1 != *=* ]]; then # an option (--lr=1, lr=1) is no number
    ngpus=$1
    shift
fi
[[ $ngpus =~ ^[1-9][0-9]{0,3}$ ]] || die "NGPUS must be a whole number from 1, not '$ngpus'"
((ngpus <= most)) || die "NGPUS is $ngpus but here are $gpus GPU(s), $cores CPU core(s): give $most"

mkdir -p logs
log=logs/dpo_ddp_$(date +%Y%m%d_%H%M%S)
[[ ${NNODES:-1} == 1 ]] || log+=.node$NODE_RANK
# tee ignores signals: it ends when the last process has closed its output
exec > >(trap '' TERM INT HUP QUIT USR1 PIPE && exec tee -a "$log.out")
exec 2> >(trap '' TERM INT HUP QUIT USR1 PIPE && exec tee -a "$log.err" >&2)
start_torchrun "$ngpus" "$here/../run_dpo_ddp.py" "$@"
