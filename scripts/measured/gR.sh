# research on serving on the first card, beside four rows of peers on the second
. /tmp/gpug/part.sh
nproc; nvidia-smi --query-gpu=name,driver_version --format=csv,noheader; G=$(nvidia-smi -L | wc -l)
if [ $G -ge 2 ]; then
(CUDA_VISIBLE_DEVICES=1 RLX_CACHE_DIR=/tmp/cp16 taskset -c 22-31 timeout 420 python3 scripts/peers.py --device cuda --precision f16 --batch 16 --budget 25 --only resnet50,unet,bert,llama > /tmp/r/peers-16.jsonl 2> /tmp/r/peers-16.err; echo "$(date +%s) peers $?" >> /tmp/g/done; cat /tmp/r/peers-16.jsonl) & fi
echo "$(date +%s) begin" > /tmp/g/done
taskset -c 0-3 timeout 60 python3 /tmp/gpug/fill.py /tmp/gpug/skel /tmp/m resnet50 distilbert > /tmp/r/fill.log 2>&1
export CUDA_VISIBLE_DEVICES=0
sv() { # label model dims clientcores windows
 SAMPLE_LABEL=$1 BATCHES="[64]" WINDOWS="$5" timeout 80 python3 /tmp/gpug/sv.py /tmp/r/$1-$2.jsonl /tmp/m/$2.onnx $3 0-9 $4 > /tmp/r/sv.log 2>&1; echo "$1 $2 $(date +%s)"; grep -o '"rows_s": [0-9.]*\|"client_cpu": [0-9.]*\|"cpu": {.*' /tmp/r/$1-$2.jsonl | tr '\n' ' '; echo; ship; }
SAMPLE=22 PYTHONPATH=/tmp/gpug/prof:$PYTHONPATH sv sampled distilbert batch=1,seq=128 10-15 "64:6,64:4,64:5"
sv wide distilbert batch=1,seq=128 10-21 "64:6,64:4,64:4"
SV_ARGS="--fronts 4" sv wide4 distilbert batch=1,seq=128 10-21 "64:6,64:4,64:4"
SAMPLE=22 PYTHONPATH=/tmp/gpug/prof:$PYTHONPATH sv sampled resnet50 batch=1 10-21 "64:6,64:4,64:5"
SV_ARGS="--fronts 4" sv wide4 resnet50 batch=1 10-21 "64:6,64:4,64:4"
wait; ship; cat /tmp/g/done; tail -3 /tmp/r/peers-16.err
