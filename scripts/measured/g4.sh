# the whole gate on two cards of four, the generator and counted memory on the others; g4.sh SECONDS
[ -f /tmp/gpu-env.sh ] || { echo no env; exit 9; }
. /tmp/gpu-env.sh; . /tmp/gpug/env.sh
nproc; nvidia-smi --query-gpu=name --format=csv,noheader | head -4
mkdir -p /tmp/g /tmp/r /tmp/m; END=$(( $(date +%s) + $1 )); G=$(nvidia-smi -L | wc -l); M=/tmp/m
part() { # card cores workers parts limits
  local name=${4//,/-}
  CUDA_VISIBLE_DEVICES=$1 RLX_CACHE_DIR=/tmp/cache-$name taskset -c $2 python3 scripts/gpu_gate.py --commit $COMMIT --covered $COVERED --workers $3 --out /tmp/g/$name --parts $4 --limits $5 > /tmp/g/$name.log 2>&1
  echo "$(date +%s) $name $?" >> /tmp/g/done
}
echo "$(date +%s) begin" > /tmp/g/done
(part 1 0-15 16 suite suite=505) &
(part 0 16-20 4 webgpu webgpu=150; part 0 16-20 4 figures figures=120; part 0 16-20 1 calibration calibration=170) &
(part 1 21-25 4 models models=500) &
(part 1 26-31 4 truth truth=150; part 1 26-31 4 generated generated=300) &
if [ $G -ge 4 ]; then
 (cd /tmp; for w in before after; do for k in 1 2 3 4; do CUDA_VISIBLE_DEVICES=2 taskset -c 32-47 timeout 100 python3 -X faulthandler /tmp/gpug/close.py $w 50 > /tmp/r/close-$w$k.log 2>&1 & done; wait; done; cd - > /dev/null
  for s in 1 2 3 4 5 6 7 8; do CUDA_VISIBLE_DEVICES=2 taskset -c 32-47 timeout 330 python3 scripts/generate_cases.py --device cuda --minutes 5 --first $((s*1000003+500)) --failures /tmp/r/fail$s.json > /tmp/r/gen$s.log 2>&1 & done; wait) &
 (cd /tmp; taskset -c 48-63 timeout 80 python3 /tmp/gpug/fill.py /tmp/gpug/skel /tmp/m bertlarge > /tmp/r/fill.log 2>&1; cd - > /dev/null
  export CUDA_VISIBLE_DEVICES=3 RLX_CACHE_DIR=/tmp/cc; taskset -c 48-63 timeout 60 python3 -m rlx_ort calibrate --quick --device cpu,cuda > /tmp/r/cal.log 2>&1
  taskset -c 48-63 timeout 390 python3 /tmp/gpug/splits.py /tmp/r/cut-bertlarge.jsonl cut /tmp/m/bertlarge.onnx batch=8,seq=128 0.667 340 nocal > /tmp/r/cut2.log 2>&1) &
else (taskset -c 16-20 timeout 100 python3 /tmp/gpug/fill.py /tmp/gpug/skel /tmp/m ocr resnet50 distilbert bert minilm vit whisper bertlarge > /tmp/r/fill.log 2>&1) & fi
ship() { tar czf $OUT/res.tgz --exclude=junit --exclude='*cache*' --exclude='truth-*' -C /tmp g r; }
while [ $(date +%s) -lt $END ]; do
  sleep 10; [ $(( $(date +%s) % 60 )) -lt 10 ] && ship
  [ $(wc -l < /tmp/g/done) -ge 8 ] && break
done
pkill -f generate_cases.py; sleep 1; ship; cat /tmp/g/done; tail -qn 1 /tmp/g/*.log | cut -c1-300; tail -qn 1 /tmp/r/close*.log | cut -c1-200; cut -c1-230 /tmp/r/cut-bertlarge.jsonl | grep -v plan\":; grep -h "^CRASH\|^WRONG\|^UNTYPED" /tmp/r/gen*.log | cut -c1-200 | sort | uniq -c | head -20
