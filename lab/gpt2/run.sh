#!/usr/bin/env bash
# GPT-2's size on one H100 or H200, by the quarter of an hour. README.md beside this says what for.
# prepare.sh has to have filled out/gpt2-pack.
#
#     bash lab/gpt2/run.sh main              # softmax, diff and diff_v2 on the same tokens
#     bash lab/gpt2/run.sh early             # diff_v2, a plus in place of its minus, an average
#     STEPS=460 bash lab/gpt2/run.sh rates   # main with half and twice the rate, of ARMS
#     STEPS=460 bash lab/gpt2/run.sh seed2   # main with another seed
#
# It ends after LIMIT seconds. The same command on the same machine goes on where it ended. MORE is
# how many seconds that second call will have, so that the runs can be longer. What is found comes
# to OUT every five seconds. DRY=1 tries all of it with a tiny model on a CPU.
set -uo pipefail
began=$SECONDS
cd "$(dirname "$0")/../.."
job=${1:-main}
LIMIT=${LIMIT:-570} MORE=${MORE:-0} DRY=${DRY:-0} PY=${PY:-python3} OUT=${OUT:-out/gpt2-found}
pack=out/gpt2-pack runs=out/gpt2-$job
[ "$DRY" = 1 ] && runs=out/gpt2-dry-$job
said=$runs/$job.txt
export PYTHONPATH=$PWD/$runs/site PYTHONUNBUFFERED=1 TIKTOKEN_CACHE_DIR=$PWD/$runs/tiktoken
export TORCHINDUCTOR_COMPILE_THREADS=3 OMP_NUM_THREADS=4  # since six models compile at a time
mkdir -p "$runs" "$OUT"

minute=90 batch=131072 evaluations=10 most=680  # 680 steps of this batch are 89 million tokens
[ "$job" = early ] && { batch=65536 evaluations=2 most=400; }
size=()
if [ "$DRY" = 1 ]; then
  export OMP_NUM_THREADS=1
  minute=600 batch=256 most=20
  size=(--device=cpu --n_layer=2 --n_embd=64 --n_head=4 --block_size=64 --batch_size=2
        --eval_tokens=2048)
fi

# ---- the parts of a job

say() { echo "== $(( SECONDS - began )) s: $*" | tee -a $said; }
left() { echo $(( LIMIT - SECONDS + began )); }

# compiles all models at the same time, and times each. Its arguments: the flags of each model
first_minute() {
  [ -e $runs/steps.jsonl ] && return  # this is a second call
  say "the first minute"
  local processes=()
  for flags in "$@"; do
    timeout -k 5 $minute "$PY" -m lab.gpt2.step $runs $# --preset=gpt2 --use=lab.arms \
      --total_batch=$batch "${size[@]}" $flags 2>> $runs/errors.txt | tee -a $said &
    processes+=($!)
  done
  "$PY" -m lab.gpt2.layout 2>&1 | tee -a $said
  wait "${processes[@]}"
  [ "$(cat $runs/steps.jsonl | wc -l)" = $# ] || tail -n 20 $runs/errors.txt | tee -a $said
}

# sets STEPS for these kinds of attention, and LONGER, softmax's steps in the time of diff_v2
plan() {
  local again=$(( MORE > 0 ? 30 : 0 ))  # seconds that a second call needs to get going
  [ -s $runs/plan ] || "$PY" -m lab.gpt2.plan $runs/steps.jsonl \
    $(( $(left) - 10 + MORE - again )) $batch $evaluations $most "$1" > $runs/plan
  read -r STEPS LONGER < $runs/plan
  say "$STEPS steps of $batch tokens"
}

# trains. Its arguments: a folder, the kind of attention, and further flags
train() {
  local folder=$runs/$1 attn=$2
  [ -e "$folder/$attn/done" ] && return
  [ "$(left)" -lt 20 ] && { say "no time is left for $1, $attn"; return; }
  say "$1, $attn"
  wait $unpacking
  timeout -k 5 "$(left)" "$PY" -m lab.gpt2.two_texts --preset=gpt2 --use=lab.arms \
    --data=$runs/data --out="$folder" --attn="$attn" --total_batch=$batch --steps="$STEPS" \
    --warmup=$(( STEPS / 14 )) --eval_every=$(( STEPS / evaluations )) "${size[@]}" "${@:3}" \
    2>&1 | tee -a $said && touch "$folder/$attn/done"
}

# copies what was said and found so far to OUT, which gets four files
collect() {
  local logs losses
  logs=$(find $runs -name log.jsonl | sort)
  losses=$(find $runs -name val_losses.npy -not -path '*/block2/*' | sort)
  [ -n "$logs" ] && cat $logs > $runs/logs && mv $runs/logs "$OUT/runs.jsonl"
  [ -n "$losses" ] && tar cf $runs/losses $losses && mv $runs/losses "$OUT/val_losses.tar"
  cp $said "$OUT"
  [ -e $runs/steps.jsonl ] && cp $runs/steps.jsonl "$OUT"
}

# ---- the jobs

main() {
  first_minute --attn=softmax --attn=diff --attn=diff_v2 "--attn=diff_v2 --mlp_width=1792" \
    --attn=linear --attn=diff_linear
  plan softmax,diff,diff_v2
  for attn in softmax diff diff_v2; do train main $attn --seed=1; done
  # is it the second map of diff, or its norm? Only where a whole run fits
  (( $(left) > STEPS * batch / 480000 + 60 )) && train main softmax_norm --seed=1
}

seed2() {
  first_minute --attn=softmax --attn=diff --attn=diff_v2
  for attn in softmax diff diff_v2; do train seed2 $attn --seed=2; done
}

rates() {
  for lr in 7.5e-4 3e-3; do
    for attn in ${ARMS:-diff}; do train lr-$lr "$attn" --seed=1 --lr=$lr; done
  done
}

# block 2 has another seed and another rate: a difference has to hold in both. (All widths are
# multiples of 64, so that no step is slow for its width)
early() {
  local one="--seed=2 --lr=1.5e-3" two="--seed=3 --lr=7.5e-4" v2=diff_v2 plus=diff_v2_smaller_plus
  first_minute --attn=softmax "--attn=$v2 --mlp_width=1792" "--attn=$plus --mlp_width=1792" \
    "--attn=gated_average --mlp_width=2048"
  plan $v2,$plus,softmax,gated_average,$v2,$plus,softmax,$v2  # the last run only if it fits
  train block1 $v2 $one --mlp_width=1792
  train block1 $plus $one --mlp_width=1792
  train block1 softmax $one
  train block1 gated_average $one --mlp_width=2048
  train block2 $v2 $two --mlp_width=1792
  train block2 $plus $two --mlp_width=1792
  train block2 softmax $two
  STEPS=$LONGER train longer softmax $one
  train block2 gated_average $two --mlp_width=2048
}

# ---- what all of them begin with

case $job in
  main | early) ;;
  rates | seed2) : "${STEPS:?how many steps had main?}" ;;
  *) echo "main, early, rates or seed2?"; exit 1 ;;
esac
"$PY" -c "import tiktoken, tyro" 2> /dev/null || \
  "$PY" -m pip install --quiet --no-index --no-deps --target $runs/site $pack/wheels/*.whl
"$PY" -c "import torch, tiktoken, tyro; print('torch', torch.__version__)" | tee -a $said || exit 1
[ "$DRY" = 1 ] || nvidia-smi --query-gpu=name,driver_version --format=csv | tee -a $said
if [ ! -d $runs/data ]; then
  cp -r $pack/tiktoken $runs
  "$PY" lab/gpt2/pack.py unpack $pack $runs/data.tmp && mv $runs/data.tmp $runs/data
fi & unpacking=$!
while kill -0 $$ 2> /dev/null; do collect; sleep 5; done & collector=$!  # ends with this script
trap 'kill $collector; collect' EXIT
$job
say "the end"
