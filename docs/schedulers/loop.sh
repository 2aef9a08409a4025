#!/usr/bin/env bash
# papermill alone, from a shell loop: one run a cluster, one failing cluster stops no other, then the comparison.
#
#   docs/schedulers/loop.sh sim-4xh100 sim-2xh200
#
# PROFILE, NOTEBOOKS: how much work, which notebooks. DEST: where the executed notebooks go: a folder, or an address
# that papermill writes to itself (s3://bucket/prefix, gs://bucket/prefix, http://host/prefix). Tables and results stand
# in the run folders below SPOC_OUTPUTS, whatever DEST is. Exit status 1 when a cluster failed.
set -uo pipefail
project=$(cd "$(dirname "$0")/../.." && pwd)
outputs=${SPOC_OUTPUTS:-$project/outputs}
dest=${DEST:-$outputs/executed}
notebooks=${NOTEBOOKS:-01_workload_modeling 02_nsga2_search 03_concurrency_sweep 04_nsight_trace_analysis}
started=$(date +%Y%m%d-%H%M%S)
mkdir -p "$outputs"
case $dest in *://*) ;; *) mkdir -p "$dest" ;; esac

execute() { # execute NOTEBOOK OUTPUT PARAMETERS...
    papermill "$project/notebooks/$1.ipynb" "$2" --cwd "$project/notebooks" -k python3 --no-progress-bar "${@:3}"
}

failed=0 finished=
for cluster in "$@"; do
    run=$outputs/$(basename "$cluster" .yaml)-$started
    while [ -e "$run" ]; do run=$run-2; done # two files of one name in two folders
    [ -f "$cluster" ] && cluster=$(realpath "$cluster")
    for notebook in $notebooks; do
        if ! execute "$notebook" "$dest/$(basename "$run").$notebook.ipynb" \
            -r cluster "$cluster" -r profile "${PROFILE:-quick}" -r run_dir "$run"; then
            echo "$cluster: $notebook failed" >&2
            failed=1
            continue 2
        fi
    done
    finished=$finished${finished:+,}$run
    last=$cluster
done
case $notebooks in *03*) ;; *) exit $failed ;; esac
[ -n "$finished" ] || exit 1
execute 05_capacity_report "$dest/report-$started.ipynb" -r cluster "$last" -r profile "${PROFILE:-quick}" \
    -r runs "$finished" -r run_dir "$outputs/report-$started" || exit 1
exit $failed
