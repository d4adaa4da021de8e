#!/bin/sh
# Makes this machine a node of an Enginehouse server, or upgrades the Enginehouse that an earlier run installed here.
#
#   curl -fsS http://SERVER:8080/join.sh | sh -s -- http://SERVER:8080 [OPTIONS]
#
# or, to read it first:
#
#   curl -fsSO http://SERVER:8080/join.sh && less join.sh && sh join.sh http://SERVER:8080 [OPTIONS]
#
# It needs Python 3.11 or newer. It writes to two directories only: that of the program, and the data directory. Nothing
# of the system's Python is changed, and no Python is downloaded. The program comes from the server, its packages from
# the package index that this machine uses; the SHA-256 of every file is checked.
set -eu

VERSION='@VERSION@'
WHEEL='@WHEEL@'
WHEEL_SHA256='@WHEEL_SHA256@'
PIP_WHEEL='@PIP_WHEEL@' # used only where this machine has neither uv nor pip
PIP_SHA256='@PIP_SHA256@'

usage() {
    cat <<'END'
usage: join.sh URL [OPTIONS]

  URL              the server, such as http://192.168.1.10:8080; several with commas
  --token @FILE    the join token is in this file; --token - reads it from standard input
  --service        install a systemd service (on a Mac: a launchd agent) instead of running in the foreground
  --data DIR       data directory of the node
  --program DIR    directory of the program (/opt/enginehouse as root, else ~/.local/share/enginehouse-program)
  --install-only   install or upgrade the program, and do not join

Every other option is one of `enginehouse join`: --name NAME, --labels KEY=VALUE, --advertise-host ADDRESS …
Without --token, the token is that of ENGINEHOUSE_TOKEN, or of an earlier run, or the script asks for it.
END
}

say() { printf '%s\n' "$*" >&2; }
fail() {
    say "join.sh: $*"
    exit 1
}

find_python() {
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            command -v "$candidate"
            return 0
        fi
    done
    fail "there is no Python 3.11 or newer on this machine; install one (for example: apt-get install python3)"
}

# fetch NAME FILE SHA256...: one file of the first server that has it, checked.
fetch() {
    "$python" - "$urls" "$@" <<'END' || exit 1
import hashlib, http.client, sys, urllib.request

urls, name, target, *expected = sys.argv[1:]
for url in urls.split(","):
    place = f"{url.rstrip('/')}/join/{name}"
    try:
        with urllib.request.urlopen(place, timeout=120) as answer:
            content = answer.read()
        break
    except (OSError, http.client.HTTPException) as error:  # the latter: the answer was cut off, or is none
        why = f"cannot fetch {place}: {getattr(error, 'reason', error) or type(error).__name__}"
        if hasattr(error, "read"):
            why += f" {error.read().decode(errors='replace')[:500]}"
else:
    sys.exit(f"join.sh: {why}")
found = hashlib.sha256(content).hexdigest()
if found not in expected:
    sys.exit(
        f"join.sh: {place} has the SHA-256 {found}, not {' or '.join(expected)}. "
        "If the server was upgraded a moment ago, paste the line again; else do not trust it."
    )
with open(target, "wb") as file:
    file.write(content)
END
}

# install_program DIR: a virtual environment with the locked packages and the program.
install_program() {
    if command -v uv >/dev/null 2>&1; then
        export UV_PYTHON_DOWNLOADS=never
        # uv does not read pip's variable; whoever has set only that one means uv too.
        if [ -n "${PIP_INDEX_URL:-}" ] && [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ]; then
            export UV_DEFAULT_INDEX="$PIP_INDEX_URL"
        fi
        # Outside any project, because uv would read its settings.
        (
            cd "$work" &&
                uv venv -q --python "$python" "$1" &&
                uv pip sync -q --compile-bytecode --python "$1/bin/python" --require-hashes requirements.txt &&
                uv pip install -q --compile-bytecode --python "$1/bin/python" --no-deps "$WHEEL"
        )
        return
    fi
    if "$python" -m venv "$1" >/dev/null 2>&1; then
        set -- "$1/bin/python" -m pip
    else
        rm -rf "$1"
        if ! "$python" -m venv --without-pip "$1" >/dev/null 2>&1; then
            # A Python without the venv module: an environment is no more than this.
            rm -rf "$1"
            mkdir -p "$1/bin" "$("$python" -c 'import sys; print("%s/lib/python%d.%d/site-packages" % (
                sys.argv[1], *sys.version_info[:2]))' "$1")"
            ln -s "$python" "$1/bin/python"
            "$python" -c 'import os, sys; print("home = " + os.path.dirname(sys.argv[1]))' "$python" >"$1/pyvenv.cfg"
        fi
        say "this Python has no pip for environments: using the one of the server"
        fetch "$PIP_WHEEL" "$work/$PIP_WHEEL" $PIP_SHA256
        set -- "$1/bin/python" "$work/$PIP_WHEEL/pip"
    fi
    "$@" install -q --disable-pip-version-check --no-input --require-hashes -r "$work/requirements.txt" &&
        "$@" install -q --disable-pip-version-check --no-input --no-index --no-deps "$work/$WHEEL"
}

# is_running DIR: whether a process runs a program of this directory, as far as this user can see.
is_running() {
    "$python" - "$1/" <<'END'
import os, pathlib, sys

own = {str(os.getpid()), str(os.getppid())}
for process in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        if process.name not in own and os.fsencode(sys.argv[1]) in (process / "cmdline").read_bytes():
            sys.exit(0)
    except OSError:
        pass  # it has ended
sys.exit(1)
END
}

# Puts this version beside the one that may be running, and makes it the current one when it is complete.
install_or_upgrade() {
    here="$program/$VERSION-$(printf '%.12s' "$WHEEL_SHA256")"
    if [ ! -e "$here/complete" ]; then
        say "installing enginehouse $VERSION into $here (a minute or so)"
        rm -rf "$here"
        mkdir -p "$program"
        fetch "$WHEEL" "$work/$WHEEL" "$WHEEL_SHA256"
        "$python" -c 'import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    sys.stdout.buffer.write(wheel.read("enginehouse/requirements.txt"))' "$work/$WHEEL" >"$work/requirements.txt"
        install_program "$here" || {
            rm -rf "$here"
            fail "the packages could not be installed; check that this machine reaches its package index" \
                "(docs/machines.md says what to do without internet), then paste the line again"
        }
        : >"$here/complete"
    else
        say "enginehouse $VERSION is installed already in $here"
    fi
    command="$program/bin/enginehouse"
    before=$(readlink "$command" 2>/dev/null || true)
    mkdir -p "$program/bin"
    rm -f "$command.new"
    ln -s "../${here##*/}/bin/enginehouse" "$command.new"
    mv -f "$command.new" "$command"
    # The version before stays, because it may be started again; and any that still runs.
    for old in "$program"/*/complete; do
        old=${old%/complete}
        case "$before" in ../"${old##*/}"/*) continue ;; esac
        [ "$old" = "$here" ] || is_running "$old" || rm -rf "$old"
    done
}

# Writes the join token to the data directory, where `enginehouse join` finds it: a command line can be read by others.
keep_token() {
    token=
    case "$token_from" in
    @*) token=$(head -n 1 -- "${token_from#@}") || fail "cannot read the join token from ${token_from#@}" ;;
    -) IFS= read -r token || [ -n "$token" ] || fail "there is no join token on standard input; with curl | sh that is" \
        "the script itself: give --token @FILE, or none to be asked" ;;
    *) token=${ENGINEHOUSE_TOKEN:-} ;;
    esac
    if [ -z "$token" ]; then
        # A node that has joined before proves itself by its key.
        [ ! -e "$data/node.json" ] || return 0
        kept=
        [ ! -s "$data/join.token" ] || kept=", or Enter to keep the one of the earlier run"
        # Standard input may be the script, so the terminal is asked.
        if (: </dev/tty) 2>/dev/null; then
            trap 'stty echo </dev/tty; exit 130' INT TERM
            stty -echo </dev/tty # before the question, which may be answered by a program
            printf 'join token (\140enginehouse nodes add\140 on the server makes one%s): ' "$kept" >/dev/tty
            IFS= read -r token </dev/tty || true
            stty echo </dev/tty
            trap - INT TERM
            printf '\n' >/dev/tty
        elif [ -z "$kept" ]; then
            fail "a join token is needed: --token @FILE, or ENGINEHOUSE_TOKEN" \
                "(\`enginehouse nodes add\` on the server makes one)"
        fi
        [ -z "$kept" ] || [ -n "$token" ] || return 0
        [ -n "$token" ] || fail "no join token was given"
    fi
    printf '%s\n' "$token" >"$data/.join.token.new"
    mv -f "$data/.join.token.new" "$data/join.token"
    unset token ENGINEHOUSE_TOKEN
}

# The data directory of the node with its token; the default is that of every `enginehouse` command.
prepare_data() {
    if [ -z "$data" ]; then
        case "$(uname)" in
        Darwin) data="$HOME/Library/Application Support/enginehouse" ;;
        *) case "${XDG_DATA_HOME:-}" in /*) data=$XDG_DATA_HOME/enginehouse ;; *) data=$HOME/.local/share/enginehouse ;; esac ;;
        esac
    fi
    umask 077
    mkdir -p "$data" || fail "cannot write to $data; choose another directory with --data DIR"
    data=$(cd "$data" && pwd -P)
    # The token of this line would replace the one that the server of that directory has.
    [ ! -e "$data/admin.token" ] || fail "$data is the data directory of a server; give the node another: --data DIR"
    keep_token
    umask 022
}

main() {
    urls='' token_from='' as_service='' data=${ENGINEHOUSE_DATA:-} program='' is_joining=1
    left=$#
    # What is not ours is kept for `enginehouse join`, in its order.
    while [ "$left" -gt 0 ]; do
        word=$1
        shift
        left=$((left - 1))
        case "$word" in
        -h | --help)
            usage
            exit 0
            ;;
        --service) as_service=1 ;;
        --install-only) is_joining= ;;
        --token | --data | --program)
            [ "$left" -gt 0 ] || fail "$word needs a value"
            case "$word" in --token) token_from=$1 ;; --data) data=$1 ;; --program) program=$1 ;; esac
            shift
            left=$((left - 1))
            ;;
        http://* | https://*) if [ -z "$urls" ]; then urls=$word; else set -- "$@" "$word"; fi ;;
        *) set -- "$@" "$word" ;;
        esac
    done
    case "$urls ${1:-}" in
    ' ' | ' -'*) usage >&2 && fail "the address of the server is missing" ;;
    ' '*) fail "$1 is not an address; write http://$1" ;;
    esac
    case "$token_from" in '' | - | @?*) ;; *) fail "a token in a command can be read by other users of this machine:" \
        "write it to a file and give --token @FILE, or leave the option out to be asked" ;; esac
    umask 022 # the program is no secret
    python=$(find_python)
    if [ -z "$program" ]; then
        program=/opt/enginehouse
        [ "$(id -u)" = 0 ] || program=${XDG_DATA_HOME:-$HOME/.local/share}/enginehouse-program
    fi
    mkdir -p "$program" || fail "cannot write to $program; choose another directory with --program DIR"
    program=$(cd "$program" && pwd -P)
    # The token first: whoever pastes the line need not wait for the packages to be asked.
    [ -z "$is_joining" ] || prepare_data
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    trap 'exit 130' INT TERM
    install_or_upgrade
    rm -rf "$work"
    trap - EXIT INT TERM
    run="$here/bin/python"
    if [ -z "$is_joining" ]; then
        say "the command is $command"
        exit 0
    fi
    umask 077
    if [ -n "$as_service" ]; then
        exec "$run" -m enginehouse service install worker --start --url "$urls" --data "$data" "$@"
    fi
    exec "$run" -m enginehouse join "$urls" --data "$data" "$@"
}

main "$@"
