# peers: batch 1 on the first card, batch 16 on the second (or one after the other); gP.sh SECONDS
. /tmp/gpug/part.sh
G=$(nvidia-smi -L | wc -l); N=$(nproc); H=$((N/2))
run() { CUDA_VISIBLE_DEVICES=$1 RLX_CACHE_DIR=/tmp/cp$3 taskset -c $2 timeout $4 python3 scripts/peers.py --device cuda --precision f16 --batch $3 --budget 25 ${5:+--only $5} >> /tmp/r/peers-$3.jsonl 2>> /tmp/r/peers-$3.err; }
if [ $G -ge 2 ]; then run 0 0-$((H-1)) 1 $1 $2 & run 1 $H-$((N-1)) 16 $1 $2 & wait; else run 0 0-$((N-1)) 1,16 $1 $2; fi
ship; for f in /tmp/r/peers-*.jsonl; do echo $f; python3 -c "import json,sys; [print(r['model'], r['batch'], r['ratio'], r['default_over_plain'], r['best'], r['ms'], r['error'].get('tuned'), r['ready_s'].get('tuned'), r['failed']) for r in (json.loads(l) for l in open(sys.argv[1]) if l[0] == '{')]" $f; done; tail -qn 2 /tmp/r/peers-*.err
