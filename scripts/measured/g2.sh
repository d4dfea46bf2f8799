# the whole gate on two cards, parts side by side; g2.sh SECONDS
. /tmp/gpu-env.sh; . /tmp/gpug/env.sh
nproc; nvidia-smi --query-gpu=name --format=csv,noheader | head -1
mkdir -p /tmp/g /tmp/r /tmp/m; END=$(( $(date +%s) + $1 ))
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
(taskset -c 16-20 timeout 60 python3 /tmp/gpug/fill.py /tmp/gpug/skel /tmp/m ocr resnet50 distilbert > /tmp/r/fill.log 2>&1) &
ship() { tar czf $OUT/res.tgz --exclude=junit --exclude='*cache*' --exclude='truth-*' -C /tmp g r; }
while [ $(date +%s) -lt $END ]; do
  sleep 10; [ $(( $(date +%s) % 60 )) -lt 10 ] && ship
  [ $(wc -l < /tmp/g/done) -ge 8 ] && break
done
ship; cat /tmp/g/done; tail -qn 1 /tmp/g/*.log | cut -c1-300
