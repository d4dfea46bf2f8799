# serving on one card and two with the tree's scheduler; a race of the U-Net on the other card meanwhile
. /tmp/gpug/part.sh
sv() { # tag cards windows model dims batches SC CC
 RLX_CACHE_DIR=/tmp/cz$4 BATCHES="$6" WINDOWS="$3" timeout 70 python3 /tmp/gpug/sv.py /tmp/r/z$1-$4.jsonl /tmp/m/$4.onnx $5 $7 $8 $2 > /tmp/r/sv-$4.log 2>&1; echo "$1 $4 $(date +%s)"; grep -o '"plain": .*\|"clients": [0-9]*\|"rows_s": [0-9.]*\|"p50": [0-9.]*\|"bad": [1-9][0-9]*\|"blocking_p50.*\|"run_ms.*' /tmp/r/z$1-$4.jsonl | tr '\n' ' '; echo; }
(CUDA_VISIBLE_DEVICES=1 RLX_CACHE_DIR=/tmp/cp16 taskset -c 24-31 timeout 140 python3 scripts/peers.py --device cuda --precision f16 --batch 16 --budget 25 --only unet > /tmp/r/peers-16.jsonl 2> /tmp/r/peers-16.err) & P=$!
sv one 0 "1:2,64:6,64:4,64:4,128:4" resnet50 batch=1 "[64,256]" 0-13 14-23 | cut -c1-700
sv one 0 "1:2,64:6,64:4,64:4,128:4" distilbert batch=1,seq=128 "[64,256]" 0-13 14-23 | cut -c1-700
wait $P
sv both 0,1 "128:7,128:4,128:4" resnet50 batch=1 "[64]" 0-19 20-31 | cut -c1-700
sv both 0,1 "128:7,128:4,128:4" distilbert batch=1,seq=128 "[64]" 0-19 20-31 | cut -c1-700
ship; grep '^{' /tmp/r/peers-16.jsonl | cut -c1-900; tail -2 /tmp/r/peers-16.err | cut -c1-300
