#!/usr/bin/env bash
# Makes the Python environment of this checkout and prints its interpreter on stdout; the rest goes to stderr.
#
#   python=$(launch/env.sh)          # add --gpu for Transformer Engine
#
# Two layers: the packages of launch/constraints.txt (11 GB) are installed once per set of pins under
# $MEGATRON_FR_ENV_ROOT and shared by all checkouts; .venv in the checkout holds only this project, its command
# and its entry points, so that checkouts do not overwrite each other's.
#
#   MEGATRON_FR_ENV_ROOT   where shared environments live   (default ~/.cache/megatron-fr)
#   MEGATRON_FR_PYTHON     the Python 3.12 to build on      (default: python3.12 of PATH or pyenv)
set -euo pipefail

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
root=${MEGATRON_FR_ENV_ROOT:-$HOME/.cache/megatron-fr}
constraints=$checkout/launch/constraints.txt
venv=$checkout/.venv
needed_gb=15
transformer_engine=2.20.2 # with --gpu; its torch part is compiled here

say() { echo "env: $*" >&2; }
fail() { say "error: $*"; exit 1; }

extra=""
case "${1:-}" in
  "") ;;
  --gpu) extra=gpu ;;
  *) fail "unknown argument '$1'; the only one is --gpu" ;;
esac

# Prints "<real interpreter> <version>" when $1 is a working Python 3.12 with venv.
probe() {
  "$1" -c 'import sys, venv, os
if sys.version_info[:2] != (3, 12): sys.exit(1)
print(os.path.realpath(sys.executable), sys.version.split()[0])' 2>/dev/null
}

find_python() {
  local candidate
  for candidate in "${MEGATRON_FR_PYTHON:-}" python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12 python3; do
    if [[ -n $candidate ]] && probe "$candidate"; then return 0; fi
  done
  return 1
}

read -r python version <<<"$(find_python || true)"
[[ -n ${python:-} ]] || fail "no Python 3.12 with the venv module; install it ('pyenv install 3.12', or your" \
  "distribution's python3.12 and python3.12-venv) or point MEGATRON_FR_PYTHON at one"

key=$({ cat "$constraints"; echo "$python $version ${extra:+$extra $transformer_engine}"; } | sha256sum | cut -c1-16)
base=$root/$key
mkdir -p "$root" || fail "cannot write to $root; set MEGATRON_FR_ENV_ROOT to a folder on a large disk"
stamp=$({ echo "$base $checkout bwrap"; cat "$checkout/setup.py"; } | sha256sum | cut -c1-16)

ready() { [[ -f $base/.complete && -x $venv/bin/python && "$(cat "$venv/.complete" 2>/dev/null)" == "$stamp" ]]; }

install_base() {
  local free_gb log=$root/$key.log
  free_gb=$(($(df -Pk "$root" | awk 'NR == 2 { print $4 }') / 1048576))
  ((free_gb >= needed_gb)) || fail "$root has $free_gb GB free, $needed_gb are needed; free some or set MEGATRON_FR_ENV_ROOT"
  [[ ! -e $base ]] || say "an earlier build of $base was interrupted; starting it again"
  rm -rf "$base"
  say "installing $(grep -cv '^#' "$constraints") packages into $base (once, 3 to 5 minutes); log: $log"
  "$python" -m venv "$base"
  # --no-deps: the pins are the complete set, so pip has nothing to resolve
  pip_install "$log" --no-deps -r "$constraints"
  if [[ $extra == gpu ]]; then
    say "building Transformer Engine against the installed torch"
    pip_install "$log" --no-build-isolation -c "$constraints" "transformer-engine[core_cu13,pytorch]==$transformer_engine"
  fi
  touch "$base/.complete"
}

pip_install() {
  local log=$1
  shift
  "$base/bin/python" -m pip install --progress-bar off "$@" 2>&1 | tee "$log" | awk '
    /^Collecting/ { if (++n % 40 == 0) { print "env: fetched " n " packages"; fflush() } }
    /^Installing collected/ { print "env: unpacking them"; fflush() }' >&2 || {
    tail -n 15 "$log" >&2
    fail "pip failed (whole log: $log); without internet access, set PIP_INDEX_URL or PIP_FIND_LINKS to a mirror," \
      "or copy $base from a machine that has it"
  }
}

# bwrap isolates the Python tool: PATH's, else Debian's, unpacked without root. A machine without either still gets its
# environment; runs that use the tool say then what is missing.
install_bwrap() {
  local unpacked=$root/bubblewrap.$$
  [[ -x $base/bin/bwrap ]] || command -v bwrap >/dev/null && return
  mkdir -p "$unpacked"
  if (cd "$unpacked" && { apt-get download bubblewrap || { apt-get update && apt-get download bubblewrap; }; } &&
    dpkg-deb -x bubblewrap_*.deb . && usr/bin/bwrap --version) >"$root/bwrap.log" 2>&1; then
    install -m 755 "$unpacked/usr/bin/bwrap" "$base/bin/bwrap"
  else
    say "no bwrap, which the Python tool needs: install the package bubblewrap (log: $root/bwrap.log)"
  fi
  rm -rf "$unpacked"
}

install_checkout() {
  say "installing this checkout into $venv"
  rm -rf "$venv"
  "$python" -m venv --without-pip "$venv"
  local packages=lib/python3.12/site-packages script name first
  # addsitedir, not a plain path: the base's own .pth files count too
  echo "import site; site.addsitedir('$base/$packages')" >"$venv/$packages/megatron_fr_base.pth"
  "$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation --editable "$checkout" >&2 ||
    fail "installing the checkout failed; see above"
  for script in "$base"/bin/*; do
    name=$(basename "$script")
    case $name in activate* | Activate* | pip* | python*) continue ;; esac
    # pip names the interpreter in line 1, or in line 2 behind a shell's exec where a #! line could not hold it
    case $(head -n 2 "$script" | tr -d '\0') in
      "#!$base/bin/python"*) first=2 ;;
      "#!/bin/sh"*exec*"$base/bin/python"*) first=4 ;;
      *) ln -s "$script" "$venv/bin/$name" && continue ;;
    esac
    # always a shell's exec: the kernel takes no space in a #! line, and only 127 or 255 bytes
    {
      printf "#!/bin/sh\n'''exec' \"%s\" \"\$0\" \"\$@\"\n' '''\n" "$venv/bin/python"
      tail -n "+$first" "$script"
    } >"$venv/bin/$name"
    chmod +x "$venv/bin/$name"
  done
  echo "$stamp" >"$venv/.complete"
}

if ! ready; then
  # one builder at a time, also across the tasks of a job that share a file system
  exec 9>"$root/lock"
  flock -n 9 || { say "waiting for another build under $root"; flock 9; }
  [[ -f $base/.complete ]] || install_base
  ready || { install_bwrap && install_checkout; }
fi
echo "$venv/bin/python"
