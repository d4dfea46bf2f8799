. /tmp/gpu-env.sh; . /tmp/gpug/env.sh
mkdir -p /tmp/g /tmp/r /tmp/m
part() { # card cores workers parts limits
  local name=${4//,/-}
  CUDA_VISIBLE_DEVICES=$1 RLX_CACHE_DIR=/tmp/cache-$name taskset -c $2 python3 scripts/gpu_gate.py --commit $COMMIT --covered $COVERED --workers $3 --out /tmp/g/$name --parts $4 --limits $5 > /tmp/g/$name.log 2>&1
  echo "$(date +%s) $name $?" >> /tmp/g/done
}
ship() { tar czf $OUT/res.tgz --exclude=junit --exclude='*cache*' --exclude='truth-*' -C /tmp g r; }
until_done() { # seconds lines
  local end=$(( $(date +%s) + $1 ))
  while [ $(date +%s) -lt $end ]; do sleep 5; [ $(( $(date +%s) % 60 )) -lt 5 ] && ship; [ $(wc -l < /tmp/g/done) -ge $2 ] && break; done
}
