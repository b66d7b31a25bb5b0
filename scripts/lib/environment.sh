# What the scripts share: a virtual environment of the repository's own, and the package with its C core in it.
#
#   environment EXTRA...   the dependencies and these extras of pyproject.toml, at the versions of constraints.txt
#   core [strict]          the package, editable; its core is compiled if a source changed; strict: warnings are errors
#
# Both do nothing where nothing changed, and scripts that run at the same time take turns. PYTHON chooses the interpreter.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
VENV=$ROOT/.venv
CONSTRAINTS=$ROOT/constraints.txt
WANTED=wanted # the package's dependencies and the extras; "alone": the extras only
PYTHON=${PYTHON:-python3}

say() { printf '==> %s\n' "$*"; }

fail() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# Quiet but for errors: -qq leaves out the warnings about package indexes that have no page for a package.
install() { "$VENV/bin/python" -m pip install -qq --disable-pip-version-check "$@"; }

environment() {
    local lock
    exec {lock}<"$ROOT"
    flock "$lock"
    if ! "$VENV/bin/python" -c '' 2>/dev/null; then
        make_venv
    fi
    install_extras "$@"
    exec {lock}<&-
}

make_venv() {
    say "making a virtual environment in $(basename "$VENV")"
    needs_python
    "$PYTHON" -m venv --clear "$VENV" ||
        fail "'$PYTHON' cannot make a virtual environment: install venv (Debian, Ubuntu: apt install python3-venv)"
}

needs_python() {
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "shmbuffer needs CPython 3.11 or later, and '$PYTHON' is not: name one in PYTHON"
}

# The stamp holds a hash of what asks for versions, and the extras that were installed under it.
install_extras() {
    local asked stamp=$VENV/.extras extra known='' installed='' missing=()
    asked=$(cat "$CONSTRAINTS" "$ROOT/pyproject.toml" | sha256sum | cut -d' ' -f1)
    [[ ! -f $stamp ]] || read -r known installed <"$stamp"
    [[ $known == "$asked" ]] || installed=''
    for extra; do
        [[ " $installed " == *" $extra "* ]] || missing+=("$extra")
    done
    ((${#missing[@]})) || return 0
    say "installing the dependencies for ${missing[*]} into $(basename "$VENV") (a minute the first time)"
    "$VENV/bin/python" "$ROOT/scripts/lib/requirements.py" "$WANTED" "${missing[@]}" >"$VENV/requirements.txt"
    install -c "$CONSTRAINTS" -r "$VENV/requirements.txt"
    echo "$asked $installed ${missing[*]}" >"$stamp"
}

core() {
    local mode=${1:-lenient} lock log warnings='' sources stamp=$VENV/.core built='' how=''
    exec {lock}<"$ROOT"
    flock "$lock"
    sources=$(cd "$ROOT" && cat pyproject.toml setup.py setup.cfg shmbuffer/_native/*/*.[ch] | sha256sum | cut -d' ' -f1)
    [[ ! -f $stamp ]] || read -r built how <"$stamp"
    if [[ $built != "$sources" || ($how != "$mode" && $how != strict) || ! -f $ROOT/shmbuffer/_native/_core.abi3.so ]]; then
        say "compiling the core"
        [[ $mode != strict ]] || warnings=1
        log=$(SHMBUFFER_WERROR=$warnings install --no-deps --no-build-isolation -e "$ROOT" 2>&1) ||
            core_failed "$log"
        echo "$sources $mode" >"$stamp"
    fi
    exec {lock}<&-
}

# A missing compiler is one sentence of setup.py, which pip wraps in a page of its own.
core_failed() {
    local sentence
    sentence=$(grep -o -m 1 'shmbuffer needs a C compiler.*' <<<"$1") && fail "$sentence"
    printf '%s\n' "$1" >&2
    fail "the core does not compile"
}
