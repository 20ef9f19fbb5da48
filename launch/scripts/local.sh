#!/usr/bin/env bash
# One machine without Slurm:  ./local.sh CONFIG [--table.key value ...]
# launch.ranks_per_node ranks; the same supervision as in a Slurm job, without a queue.
set -euo pipefail

if [[ -n "${MEGARL_SETUP:-}" ]]; then
    set +u # which modules and conda do not bear
    megarl_words=("$@")
    set -- # conda takes the words of the script that sources it for its own
    # shellcheck source=/dev/null
    source "$MEGARL_SETUP"
    set -- "${megarl_words[@]}"
    set -u
fi
exec "${MEGARL_PYTHON:-python3}" -m megarl.cli launch "$@" --launch.layout local
