# plans against cuts by hand, side by side
[ -f /tmp/gpu-env.sh ] || { echo no env; exit 9; }
. /tmp/gpu-env.sh; END=$(( $(date +%s) + $1 )); N=$(nproc); G=$(nvidia-smi -L | wc -l); M=/tmp/m; rm -f /tmp/r/done2
on() { local k=$1; shift; local g=$((k % G)); CUDA_VISIBLE_DEVICES=$g RLX_CACHE_DIR=/tmp/cc taskset -c $(( (k*16) % N ))-$(( (k*16) % N + 15 )) "$@"; }
on 0 timeout 60 python3 -m rlx_ort calibrate --quick --device cpu,cuda > /tmp/r/cal.log 2>&1
(on 0 timeout 170 python3 /tmp/gpug/splits.py /tmp/r/cut-resnet50.jsonl cut $M/resnet50.onnx batch=8 0.89 120 nocal > /tmp/r/cut1.log 2>&1; echo resnet $? >> /tmp/r/done2) &
(on 1 timeout 170 python3 /tmp/gpug/splits.py /tmp/r/cut-bertlarge.jsonl cut $M/bertlarge.onnx batch=8,seq=128 0.667 120 nocal > /tmp/r/cut2.log 2>&1; echo bert $? >> /tmp/r/done2) &
[ $G -ge 4 ] && (on 2 timeout 170 python3 /tmp/gpug/splits.py /tmp/r/llama.jsonl llama 130 nocal > /tmp/r/llama.log 2>&1; echo llama $? >> /tmp/r/done2) &
[ $G -ge 4 ] && (on 3 timeout 170 python3 /tmp/gpug/splits.py /tmp/r/pipe-bert.jsonl pipe $M/bert.onnx batch=2,seq=128 60 nocal > /tmp/r/pipe.log 2>&1; cd /tmp/m; for h in heuristic ours one; do on 3 timeout 60 python3 /tmp/gpug/ocr.py /tmp/r/ocr.jsonl $M/ocr.onnx cuda $h > /tmp/r/ocr-$h.log 2>&1; done; echo pipe $? >> /tmp/r/done2) &
while [ $(date +%s) -lt $END ]; do sleep 3; [ -f /tmp/r/done2 ] && [ $(wc -l < /tmp/r/done2) -ge $(( G >= 4 ? 4 : 2 )) ] && break; done
tar czf $OUT/res2.tgz -C /tmp r; cat /tmp/r/done2; cut -c1-210 /tmp/r/cut-resnet50.jsonl /tmp/r/cut-bertlarge.jsonl /tmp/r/llama.jsonl /tmp/r/pipe-bert.jsonl | grep -v '"plan"'; cut -c1-300 /tmp/r/ocr.jsonl
