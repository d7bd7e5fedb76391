#!/usr/bin/env bash
# A complete run on this machine: a tiny model learns to answer with a Python tool. No GPU, no download.
#
#   launch/local.sh                                              # as configs/tiny_python_tool.yaml says
#   launch/local.sh train.num_updates=20 output=runs/short       # with section.field=value overrides
#
# The first call makes the environment and the model, later ones reuse them. Ctrl-C ends the run in order.
# MEGATRON_FR_CACHE is where the model is kept (default ~/.cache/megatron-fr).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(launch/env.sh)
export OMP_NUM_THREADS=1

# where its tool could not run isolated, say so before anything is made; agent.tool.sandbox=none is the way past it
[[ " $* " == *" agent.tool.sandbox=none "* ]] || "$python" -m megatron_fr.sandbox.check

# its folder is named after what makes it, so that checkouts with another recipe keep another model
model=$("$python" -m tools.make_tiny_model)

# exec: signals reach the run itself, and its exit code is this script's
exec "$(dirname "$python")/megatron-fr" train --config configs/tiny_python_tool.yaml \
  "model.path=$model" "data.train=$model/train.jsonl" "data.eval=$model/eval.jsonl" "$@"
