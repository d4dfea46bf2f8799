# serving on one card and on two, and the splits: gY.sh CARD OTHER SERVERCORES CLIENTCORES [two]
. /tmp/gpug/part.sh
sv() { # label cards windows model dims batches
 BATCHES="$6" WINDOWS="$3" timeout 70 python3 /tmp/gpug/sv.py /tmp/r/$TAG-$1-$4.jsonl /tmp/m/$4.onnx $5 $SC $CC $2 > /tmp/r/sv-$TAG.log 2>&1; echo "$TAG $1 $4 $(date +%s)"; grep -o '"plain": .*\|"clients": [0-9]*\|"rows_s": [0-9.]*\|"p50": [0-9.]*\|"bad": [0-9]*\|"blocking_p50.*\|"run_ms.*' /tmp/r/$TAG-$1-$4.jsonl | tr '\n' ' '; echo; ship; }
SC=$3; CC=$4; A=$1; B=$2; D=$5
while [ ! -f /tmp/m/whisper.onnx ]; do sleep 1; done
for m in "distilbert batch=1,seq=128" "resnet50 batch=1"; do set -- $m
 sv one $A "1:2,64:6,64:4,64:4,128:4,128:4" $1 $2 "[16,64,128,256]"
 sv both $A,$B "128:7,128:4,128:4" $1 $2 "[64]"; done
[ "$D" = two ] && { CUDA_VISIBLE_DEVICES=$A,$B taskset -c $SC timeout 120 python3 /tmp/gpug/two.py /tmp/r/two.jsonl /tmp/m/minilm.onnx /tmp/m/bert.onnx > /tmp/r/two.log 2>&1; cat /tmp/r/two.jsonl; tail -3 /tmp/r/two.log; }
ship
