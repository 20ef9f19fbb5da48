#!/usr/bin/env bash
# One machine without Slurm:  ./local.sh CONFIG [--table.key value ...]
# launch.ranks_per_node ranks; the same supervision as in a Slurm job, without a queue.
set -euo pipefail

if [[ -n "${MEGARL_SETUP:-}" ]]; then
    if [[ ! -r "$MEGARL_SETUP" ]]; then
        echo "megarl: error: MEGARL_SETUP: there is no readable file $MEGARL_SETUP (working folder $PWD); correct or unset it" >&2
        exit 2
    fi
    set +u # which modules and conda do not bear
    megarl_words=("$@")
    set -- # conda takes the words of the script that sources it for its own
    # shellcheck source=/dev/null
    source "$MEGARL_SETUP"
    set -- "${megarl_words[@]}"
    set -u
fi
python="${MEGARL_PYTHON:-python3}"
if ! problem=$("$python" -c "import megarl" 2>&1); then
    echo "megarl: error: MEGARL_PYTHON is ${MEGARL_PYTHON:-not set}; tried $(type -P "$python" || echo "$python") on $(uname -n)," \
        "which cannot import megarl (${problem##*$'\n'}); set MEGARL_PYTHON to the Python of the trainer's environment," \
        "as in: export MEGARL_PYTHON=\$PWD/megarl-env/bin/python" >&2
    exit 2
fi
exec "$python" -m megarl.cli launch "$@" --launch.layout local
