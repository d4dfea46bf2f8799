# serving with lent outputs on the first card, a profile of the U-Net on the second
. /tmp/gpug/part.sh
nproc; nvidia-smi --query-gpu=name,driver_version --format=csv,noheader; G=$(nvidia-smi -L | wc -l)
(CUDA_VISIBLE_DEVICES=$((G-1)) RLX_CACHE_DIR=/tmp/cpu16 taskset -c $(( $(nproc) - 10 ))-$(( $(nproc) - 1 )) timeout 100 python3 /tmp/gpug/prof_unet.py unet 16 > /tmp/r/prof-unet.txt 2>&1) &
taskset -c 0-3 timeout 60 python3 /tmp/gpug/fill.py /tmp/gpug/skel /tmp/m resnet50 distilbert bert minilm vit whisper ocr > /tmp/r/fill.log 2>&1
export CUDA_VISIBLE_DEVICES=0
timeout 40 taskset -c 0-9 python3 /tmp/gpug/micro.py /tmp/r/micro.jsonl /tmp/m/distilbert.onnx batch=1,seq=128 2>&1 | tail -5
sv() { BATCHES="$5" WINDOWS="64:6,64:4,64:4,1:2" timeout 80 python3 /tmp/gpug/sv.py /tmp/r/$1-$2.jsonl /tmp/m/$2.onnx $3 0-9 $4 > /tmp/r/sv.log 2>&1; echo "$1 $2 $(date +%s)"; grep -o '"plain": .*\|"rows_s": [0-9.]*\|"p50": [0-9.]*\|"blocking_p50.*\|"run_ms.*' /tmp/r/$1-$2.jsonl | tr '\n' ' '; echo; ship; }
sv lent distilbert batch=1,seq=128 10-15 "[64,128,256]"
sv lent resnet50 batch=1 10-15 "[64,128,256]"
wait; ship; cat /tmp/r/prof-unet.txt | cut -c1-170
