#!/usr/bin/env bash
# One cluster a task of a Slurm array; the list of clusters is the file CLUSTERS, a name or path a line.
#
#   sbatch --array=0-1 docs/schedulers/slurm.sh clusters.txt
#   sbatch --dependency=afterany:JOBID --wrap "spoc report RUN RUN"
#
# Slurm sends SIGTERM before it kills: the run then closes its books, and the same task, queued again, goes on after the
# last finished notebook. Exit status of a task: that of `spoc run`.
#SBATCH --job-name=spoc
#SBATCH --time=04:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --output=spoc-%A-%a.log
set -euo pipefail
clusters=$1 # a list, a name or path of a cluster a line
cluster=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" "$clusters")
[ -n "$cluster" ] || { echo "$clusters has no line $((SLURM_ARRAY_TASK_ID + 1)): mend --array" >&2; exit 2; }

exec spoc run "$cluster" --profile "${PROFILE:-standard}" --only "${NOTEBOOKS:-01,02,03,04}" \
    --run-id "$(basename "$cluster" .yaml)-${SLURM_ARRAY_JOB_ID}" --resume
