#!/usr/bin/env bash
# What a release is made of, tried as a stranger would try it: built from a clone, installed in
# clean environments, asked for what README shows, upgraded from a commit before, and removed.
#
#   make release-check                  the wheel and the sdist, without torch
#   make release-check TORCH=1          also with torch, by the extra "train"
#   make release-check FROM=COMMIT      also a database of that commit's version
set -euo pipefail

repository=$(git rev-parse --show-toplevel)
work=$(mktemp --directory)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH XDG_DATA_HOME XDG_CONFIG_HOME "${!MOETUNE_@}"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=$repository/constraints.txt
mkdir "$work/home" "$work/here"

fail() { echo "FAILED: $*" >&2; exit 1; }

# gives CODE PATTERN COMMAND…: the command ends with that exit code, and prints the pattern.
gives() {
    local code=0 wanted=$1 pattern=$2
    shift 2
    (cd "$work/here" && HOME=$work/home "$@") >"$work/out" 2>&1 </dev/null || code=$?
    [[ $code -eq $wanted ]] || { cat "$work/out" >&2; fail "exit code $code, not $wanted: $*"; }
    grep -qE -- "$pattern" "$work/out" || { cat "$work/out" >&2; fail "no '$pattern': $*"; }
    echo "ok  ${*##*/bin/}"
}

# environment NAME REQUIREMENT…: a new environment with these and nothing else.
environment() {
    python3 -m venv "$work/$1"
    [[ $# -eq 1 ]] || "$work/$1/bin/pip" install --quiet "${@:2}"
}

question=(--model qwen3-30b-a3b --profile h100-x8 --world-size 64 --global-batch 1024 --seq 4k
    --target megatron --output plan.json)

# What every installation can do, with and without extras.
can_plan() {
    local moetune=$work/$1/bin/moetune name
    gives 0 'moetune [0-9]+\.[0-9]+\.[0-9]+$' "$moetune" --version
    for name in $("$moetune" --help | sed -nE '/^Commands:/,$s/^  ([a-z]+) .*/\1/p'); do
        gives 0 Usage "$moetune" "$name" --help
    done
    for name in bash zsh fish; do gives 0 moetune "$moetune" completion "$name"; done
    gives 0 'One step: [0-9.]+ s' "$moetune" plan "${question[@]}"
    gives 0 'How far to trust it' "$moetune" explain plan.json
    gives 0 '' "$moetune" export plan.json --output train.sh
    gives 0 'It starts and fits' "$moetune" check train.sh --profile h100-x8
    gives 0 'inside its range' "$moetune" observe plan.json --step 4.6s
    gives 0 'qwen3-30b-a3b' "$moetune" plans list
    gives 0 'layouts of mixtral-8x7b' "$moetune" memory mixtral-8x7b --world-size 64
    gives 0 properties "$moetune" schema plan
    gives 0 '' "$moetune" db check
}

# Which extra is missing, by the command that installs it.
names_extras() {
    local moetune=$work/$1/bin/moetune
    gives 1 "pip install 'moetune\[train\]'" "$moetune" profile --nproc 1 --budget 5s
    gives 1 "pip install 'moetune\[serve\]'" "$moetune" serve --port 0
    gives 1 "pip install 'moetune\[report\]'" "$moetune" report --output a.html --plan plan.json
    gives 1 "pip install 'moetune\[postgres\]'" "$moetune" --db postgresql+psycopg://x/y plans list
}

git clone --quiet "$repository" "$work/clone"
environment build build
"$work/build/bin/python" -m build --outdir "$work/dist" "$work/clone" >"$work/out" 2>&1 ||
    { cat "$work/out" >&2; fail 'the build'; }
wheel=$(echo "$work"/dist/*.whl) sdist=$(echo "$work"/dist/*.tar.gz)

"$work/build/bin/python" -m zipfile --list "$wheel" >"$work/names"
for name in moetune/_migrations/env.py moetune/_profiles/h100-x8.toml moetune/_schemas/plan.json \
    moetune/report/templates/report.html moetune/report/static/moetune.css licenses/LICENSE \
    moetune/service/pages/templates/base.html moetune/huggingface/models/qwen3-30b-a3b.json; do
    grep -q "$name" "$work/names" || fail "the wheel lacks $name"
done
tar --list --file "$sdist" >>"$work/names"
for name in LICENSE README.md SKILL.md CHANGELOG.md tests/conftest.py docs/index.md; do
    grep -qE "^moetune-[0-9.]+/$name$" "$work/names" || fail "the sdist lacks $name"
done
! grep -E '__pycache__|\.pyc|\.db\b|/\.|^tests/' "$work/names" | grep -vE '/\.gitignore$' ||
    fail 'a file that does not belong'

environment plain
find "$work/plain" -type f ! -name '*.pyc' | sort >"$work/before"

"$work/plain/bin/pip" install --quiet "$wheel"
can_plan plain
names_extras plain
"$work/plain/bin/pip" install --quiet 'moetune[report]'     # as the error says
gives 0 a.html "$work/plain/bin/moetune" report --output a.html --plan plan.json
environment source "$sdist"
can_plan source
environment pipx pipx
PIPX_HOME=$work/pipx-home gives 0 '^moetune' "$work/pipx/bin/pipx" run --spec "$wheel" moetune --version
if [[ -n ${TORCH:-} ]]; then
    environment train torch "$wheel[train,report,serve]"
    can_plan train
    gives 0 'GEMM' "$work/train/bin/moetune" profile --nproc 1 --preset quick --budget 10s
fi
if [[ -n ${FROM:-} ]]; then
    git -C "$work/clone" checkout --quiet "$FROM"
    environment old "$work/clone"
    export MOETUNE_DB=$work/old.db
    gives 0 'One step' "$work/old/bin/moetune" plan "${question[@]}"
    gives 0 '' "$work/old/bin/moetune" profiles import "$work/clone/profiles/h100-x8.toml" --name mine
    chmod g+w "$work/old.db"
    gives 7 'moetune db upgrade' "$work/plain/bin/moetune" plans list
    chmod g-w "$work/old.db"
    gives 0 'old-before-[0-9]+[.]db' "$work/plain/bin/moetune" plans list
    gives 0 'qwen3-30b-a3b' "$work/plain/bin/moetune" plans list
    gives 0 'One step' "$work/plain/bin/moetune" plan "${question[@]}" --profile mine
    gives 0 '' "$work/plain/bin/moetune" db check
    unset MOETUNE_DB
fi
"$work/plain/bin/pip" freeze | sed 's/ @.*//' | xargs "$work/plain/bin/pip" uninstall --quiet --yes
find "$work/plain" -type f ! -name '*.pyc' | sort | diff "$work/before" - || fail 'files are left'
echo "A release can be made of $(git -C "$repository" rev-parse --short HEAD): $(ls "$work/dist" | xargs)"
