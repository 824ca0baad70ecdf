#!/usr/bin/env bash
# Installs what the RDMA tests need: packages by apt, and two that are only unpacked into .cache/rdma. Safe to repeat:
# complete means done in a blink. The tests call it themselves, so `make test` needs nothing else.
#
#   scripts/rdma_tools.sh          everything: pyverbs, perftest, QEMU, busybox and a kernel with soft-RoCE
#   scripts/rdma_tools.sh fake     only what the LD_PRELOAD provider needs: pyverbs, a C compiler, verbs.h
#
# Nothing that is installed is removed or upgraded. Unpacked, not installed: the kernel (no initramfs, no boot hooks) and
# busybox-static (it would push out busybox). Ends with status 3 and one line on stderr where the machine cannot have them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly what=${1:-all} cache=.cache/rdma
readonly log=$cache/install.log
readonly fake_packages=(python3-pyverbs ibverbs-providers libibverbs-dev gcc libc6-dev)
readonly vm_packages=(qemu-system-x86 iproute2 perftest ibverbs-utils)
readonly apt=(apt-get -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 -qq -y)

cannot() {
    printf 'rdma tools: %s\n' "$1" >&2
    exit 3
}

have_fake() {
    [[ -e /usr/include/infiniband/verbs.h ]] && command -v gcc >/dev/null &&
        compgen -G '/usr/lib/python3/dist-packages/pyverbs/device.cpython-311-*.so' >/dev/null
}

have_programs() {
    local program
    for program in qemu-system-x86_64 rdma tc ib_write_bw ib_read_bw ibv_devinfo; do
        command -v "$program" >/dev/null || return 1
    done
}

have_kernel() { compgen -G "$cache/kernel/boot/vmlinuz-*-amd64" >/dev/null; }
have_busybox() { [[ -x $cache/busybox/bin/busybox ]]; }

missing_packages() {
    have_fake || printf '%s\n' "${fake_packages[@]}"
    [[ $what == fake ]] || have_programs || printf '%s\n' "${vm_packages[@]}"
}

complete() { have_fake && { [[ $what == fake ]] || { have_programs && have_kernel && have_busybox; }; }; }

# again COMMAND...: once more with fresh package lists, if it fails with those that are there (none, in a new container).
again() { "$@" >>"$log" 2>&1 || { "${apt[@]}" update >>"$log" 2>&1 && "$@" >>"$log" 2>&1; }; }

install_packages() { DEBIAN_FRONTEND=noninteractive "${apt[@]}" install --no-install-recommends --no-remove --no-upgrade "$@"; }

# unpack PACKAGE FOLDER: the folder appears only when it is whole.
unpack() {
    local work status=0
    work=$(mktemp -d -p "$cache")
    { (cd "$work" && apt-get -o Acquire::Retries=3 -qq download "$1") && dpkg-deb -x "$work"/*.deb "$work/root" &&
        rm -rf "$2" && mv "$work/root" "$2"; } || status=1
    rm -rf "$work"
    return $status
}

unpack_kernel() {
    local package
    # Not the cloud flavour: it has neither rdma_rxe nor 9p.
    package=$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: \(linux-image-[^ ]*\).*/\1/p' | head -n 1)
    [[ -n $package ]] && unpack "$package" "$cache/kernel"
}

complete && exit 0
[[ $(uname -m) == x86_64 ]] || cannot "the virtual machine's kernel and modules are for x86_64, this is $(uname -m)"
command -v apt-get >/dev/null || cannot "no apt-get here; install by hand: ${fake_packages[*]} ${vm_packages[*]}"
mkdir -p "$cache"
exec 9>"$cache/install.lock"
flock 9
complete && exit 0
: >"$log"

mapfile -t packages < <(missing_packages)
if ((${#packages[@]})); then
    [[ $(id -u) == 0 ]] || cannot "not root; run: sudo apt-get install --no-install-recommends ${packages[*]}"
    printf 'rdma tools: installing %s ...\n' "${packages[*]}"
    again install_packages "${packages[@]}" ||
        cannot "apt-get failed (no network?), see $log; run: apt-get install --no-install-recommends ${packages[*]}"
fi
have_fake || cannot "python3-pyverbs of this system is not for Python 3.11, which .venv uses"
[[ $what == fake ]] && exit 0
printf 'rdma tools: fetching a kernel with soft-RoCE (70 MB, once) ...\n'
have_kernel || again unpack_kernel || cannot "no kernel (no network?), see $log; run: scripts/rdma_tools.sh"
have_busybox || again unpack busybox-static "$cache/busybox" || cannot "no busybox-static, see $log; run: scripts/rdma_tools.sh"
complete || cannot "the packages are installed but programs are missing, see $log"
