#!/usr/bin/env bash
# Runs run_dpo_ddp.py on Aurora (PBS, Intel GPUs): one process per tile, 12 per node.
#
# Set the project in the -A line, then submit from the root of the repository:
#   qsub scripts/run_dpo_ddp_aurora.sh
#   qsub -l select=4,walltime=06:00:00 -v CONFIG=my.yaml,OPTIONS="--lr 1e-6" scripts/run_dpo_ddp_aurora.sh
#
#   CONFIG      YAML (default configs/run_dpo_ddp.yaml)
#   OPTIONS     options of run_dpo_ddp.py that win over it; no spaces inside a value
#   OUTPUT_DIR  default outputs/dpo_ddp_JOBNAME: a job of the same name resumes what it finds there
#   REQUEUE=1   submit the job again when time was too short, with the nodes and the time that stand
#               below: change them there, not on the command line
#
# Up to 5 minutes before the end the run saves and stops with status 0; REQUEUE=1, or the same qsub
# by hand, goes on from there. Output: logs/dpo_ddp_JOBID.out and .err.
#
#PBS -N dpo_ddp
#PBS -A your_project_name
#PBS -q debug
#PBS -l select=2:system=aurora,place=scatter
#PBS -l walltime=01:00:00
#PBS -l filesystems=home:flare
#PBS -k doe
set -euo pipefail

: "${PBS_NODEFILE:?not in a PBS job: qsub scripts/run_dpo_ddp_aurora.sh}"
cd -- "$PBS_O_WORKDIR" # the folder of qsub: PBS runs a copy of this file from elsewhere
config=${CONFIG:-configs/run_dpo_ddp.yaml}
mkdir -p logs
log=logs/dpo_ddp_$PBS_JOBID
exec >>"$log.out" 2>>"$log.err"

if type module >/dev/null 2>&1; then
    module load frameworks # torch with XPU and xccl; ZE_FLAT_DEVICE_HIERARCHY=FLAT: a tile is a device
fi
ranks=$((12 * $(sort -u "$PBS_NODEFILE" | wc -l)))
# Each rank sees all tiles and takes the one of its local rank: a mask would give all the same one.
unset ZE_AFFINITY_MASK
first=$(head -n 1 "$PBS_NODEFILE")
export MASTER_ADDR=${first%%.*}.hsn.cm.aurora.alcf.anl.gov # the fast network
export MASTER_PORT=$((10000 + ${PBS_JOBID%%[!0-9]*} % 20000))
export WORLD_SIZE=$ranks # PALS does not tell it
export CCL_PROCESS_LAUNCHER=pmix CCL_ATL_TRANSPORT=mpi CCL_KVS_MODE=mpi FI_MR_CACHE_MONITOR=userfaultfd
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
# Cores 0 and 52 belong to the system; four cores to each tile, on its side of the node.
bind=4-7:8-11:12-15:16-19:20-23:24-27:56-59:60-63:64-67:68-71:72-75:76-79

time_limit=$(qstat -f "$PBS_JOBID" | awk -F '[ =:]+' '/Resource_List.walltime/ {print $3 * 60 + $4}')
minutes=$((time_limit - 5)) # what is left for loading modules, and for saving
if ((minutes < 1)); then
    echo "a walltime of $time_limit minutes leaves no time to train" >&2
    exit 2
fi
output=${OUTPUT_DIR:-outputs/dpo_ddp_$PBS_JOBNAME}
IFS=' ' read -ra options <<<"${OPTIONS:-}"
status=0
mpiexec -n "$ranks" -ppn 12 --hostfile "$PBS_NODEFILE" --pmi=pmix --cpu-bind=list:"$bind" \
    python run_dpo_ddp.py --config "$config" --output_dir "$output" --max_minutes "$minutes" \
    "${options[@]}" || status=$?
if ((status == 0)) && [[ ${REQUEUE:-0} == 1 ]] && tail -n 50 "$log.out" | grep -q 'stopped by time limit'; then
    qsub -N "$PBS_JOBNAME" -v "CONFIG=$config,OUTPUT_DIR=$output,REQUEUE=1,OPTIONS=${OPTIONS:-} --fresh=False" \
        "$PWD/scripts/run_dpo_ddp_aurora.sh"
fi
exit "$status"
