# serving on one card and two with the scheduler as it is in the tree; two models on two pairs of cards
. /tmp/gpug/part.sh
nproc; nvidia-smi --query-gpu=name --format=csv,noheader | head -1
taskset -c 0-3 timeout 60 python3 /tmp/gpug/fill.py /tmp/gpug/skel /tmp/m distilbert resnet50 > /tmp/r/fill.log 2>&1
sv() { # tag cards windows model dims batches SC CC
 RLX_CACHE_DIR=/tmp/cz$4 BATCHES="$6" WINDOWS="$3" timeout 70 python3 /tmp/gpug/sv.py /tmp/r/z$1-$4.jsonl /tmp/m/$4.onnx $5 $7 $8 $2 > /tmp/r/sv-$4.log 2>&1; echo "$1 $4 $(date +%s)"; grep -o '"plain": .*\|"clients": [0-9]*\|"rows_s": [0-9.]*\|"p50": [0-9.]*\|"bad": [1-9][0-9]*\|"blocking_p50.*\|"run_ms.*' /tmp/r/z$1-$4.jsonl | tr '\n' ' '; echo; }
(CUDA_VISIBLE_DEVICES=1 RLX_CACHE_DIR=/tmp/cpu16 taskset -c 24-31 timeout 75 python3 /tmp/gpug/prof_unet.py unet 16 > /tmp/r/prof-unet.txt 2>&1) & P=$!
sv one 0 "1:2,64:6,64:4,64:4,128:4" resnet50 batch=1 "[64,256]" 0-13 14-23 | cut -c1-700
sv one 0 "1:2,64:6,64:4,64:4,128:4" distilbert batch=1,seq=128 "[64,256]" 0-13 14-23 | cut -c1-700
wait $P
sv both 0,1 "128:7,128:4,128:4" resnet50 batch=1 "[64]" 0-19 20-31 | cut -c1-700
sv both 0,1 "128:7,128:4,128:4" distilbert batch=1,seq=128 "[64]" 0-19 20-31 | cut -c1-700
wait; tar czf $OUT/res.tgz -C /tmp r; grep -v cudnn_fe /tmp/r/prof-unet.txt | cut -c1-200 | tail -60
