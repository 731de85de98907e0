#!/usr/bin/env bash
# Runs run_dpo_ddp.py on Aurora (PBS, Intel GPUs): one process per tile, 12 per node.
#
# Set the project in the -A line (or qsub -A PROJECT), then submit from the root of the repository:
#   qsub scripts/run_dpo_ddp_aurora.sh
#   qsub -l select=4,walltime=06:00:00 -v CONFIG=my.yaml,OPTIONS="--lr 1e-6 --num_epochs 20" scripts/run_dpo_ddp_aurora.sh
#
#   CONFIG      YAML (default configs/run_dpo_ddp.yaml)
#   OPTIONS     options of run_dpo_ddp.py that win over it; no spaces inside a value
#   OUTPUT_DIR  default outputs/dpo_ddp_JOBNAME: a job of the same name resumes what it finds there
#   PPN         processes per node (default 12, all tiles)
#   PYTHON      interpreter (default python, of the frameworks module)
#   WALLTIME    seconds the job has, where qstat cannot say (default 7200)
#   REQUEUE=1   submit the job again when time was too short
#
# 5 minutes before the end the run writes a checkpoint and stops with exit status 0; REQUEUE=1, or the
# same qsub by hand, goes on from there. Output: logs/dpo_ddp_JOBID.out and .err.
#
#PBS -N dpo_ddp
#PBS -A your_project_name
#PBS -q debug
#PBS -l select=2:system=aurora,place=scatter
#PBS -l walltime=01:00:00
#PBS -l filesystems=home:flare
#PBS -k doe
set -euo pipefail

die() {
    printf 'run_dpo_ddp_aurora.sh: %s\n' "$1" >&2
    exit 2
}

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '2,/^#PBS/{/^#PBS/!s/^# \{0,1\}//p;}' "$0"
    exit 0
fi
[[ -n ${PBS_NODEFILE:-} ]] || die "not in a PBS job; submit it: qsub scripts/run_dpo_ddp_aurora.sh"
cd -- "${PBS_O_WORKDIR:-.}"
# PBS runs a copy of this file from its spool folder: it cannot look for the script beside itself.
[[ -f run_dpo_ddp.py ]] || die "no run_dpo_ddp.py in $PWD; submit from the root of the repository"
config=${CONFIG:-configs/run_dpo_ddp.yaml}
[[ -f $config ]] || die "no config file $config"
mkdir -p logs
exec >>"logs/dpo_ddp_${PBS_JOBID:-job}.out" 2>>"logs/dpo_ddp_${PBS_JOBID:-job}.err"

if type module >/dev/null 2>&1; then
    module load frameworks # torch with XPU and xccl; ZE_FLAT_DEVICE_HIERARCHY=FLAT: a tile is a device
fi
nodes=$(sort -u "$PBS_NODEFILE" | wc -l)
ppn=${PPN:-12}
[[ $ppn =~ ^[1-9][0-9]{0,2}$ ]] || die "PPN must be a whole number from 1, not '$ppn'"
ranks=$((nodes * ppn))

# Each rank sees all tiles and takes the one of its local rank: a mask would give all of them the same.
unset ZE_AFFINITY_MASK
master=$(head -n 1 "$PBS_NODEFILE")
if [[ $master == *.hsn.cm.aurora.alcf.anl.gov || $master != x[0-9]* ]]; then
    export MASTER_ADDR=$master
else
    export MASTER_ADDR=${master%%.*}.hsn.cm.aurora.alcf.anl.gov # the fast network
fi
number=${PBS_JOBID:-0}
number=${number%%[!0-9]*}
export MASTER_PORT=$((10000 + ${number:-0} % 20000)) WORLD_SIZE=$ranks # PALS does not tell the world size
export CCL_PROCESS_LAUNCHER=pmix CCL_ATL_TRANSPORT=mpi CCL_KVS_MODE=mpi FI_MR_CACHE_MONITOR=userfaultfd

# Cores 0 and 52 belong to the system; four cores to each tile, on its side of the node.
bind=(--cpu-bind=list:4-7:8-11:12-15:16-19:20-23:24-27:56-59:60-63:64-67:68-71:72-75:76-79)
((ppn == 12)) || bind=(--cpu-bind=depth --depth=$((ppn < 100 ? 100 / ppn : 1)))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

seconds=$(qstat -f "${PBS_JOBID:-}" 2>/dev/null |
    awk -F '[ =:]+' '/Resource_List.walltime/ {print ($3 * 60 + $4) * 60 + $5}' || true)
seconds=${seconds:-${WALLTIME:-7200}}
minutes=$(((seconds - 300) / 60)) # what is left for loading modules, and for writing the checkpoint
((minutes >= 1)) || die "a walltime of $seconds s leaves no time to train"

output=${OUTPUT_DIR:-outputs/dpo_ddp_${PBS_JOBNAME:-run}}
IFS=' ' read -ra options <<<"${OPTIONS:-}"
log=logs/dpo_ddp_${PBS_JOBID:-job}.out
printf '%s processes on %s nodes, MASTER_ADDR=%s, %s minutes, output %s\n' \
    "$ranks" "$nodes" "$MASTER_ADDR" "$minutes" "$output"
status=0
mpiexec -n "$ranks" -ppn "$ppn" --hostfile "$PBS_NODEFILE" --pmi=pmix "${bind[@]}" \
    "${PYTHON:-python}" run_dpo_ddp.py --config "$config" --output_dir "$output" --max_minutes "$minutes" \
    ${options[@]+"${options[@]}"} || status=$?
if ((status == 0)) && [[ ${REQUEUE:-0} == 1 ]] && tail -n 50 "$log" | grep -q 'checkpoint written'; then
    printf 'time was up: submitting the job again\n'
    qsub -N "${PBS_JOBNAME:-dpo_ddp}" -v "CONFIG=$config,OUTPUT_DIR=$output,PPN=$ppn,REQUEUE=1,OPTIONS=${OPTIONS:-}" \
        "$PWD/scripts/run_dpo_ddp_aurora.sh"
fi
exit "$status"
