# outputs lent and not lent, an export whose output sizes have the names of its inputs'
. /tmp/gpug/part.sh
nproc; nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
timeout 60 python3 /tmp/gpug/ex.py > /tmp/r/ex.log 2>&1; ls -la /tmp/m
F=providers/engine/lent_outputs.py
lend() { sed -i "s/^RUNS_BEFORE = [0-9]*/RUNS_BEFORE = $1/" $F; grep -n "^RUNS_BEFORE" $F; }
for n in 3 1000000000 3; do lend $n; timeout 40 taskset -c 0-9 python3 /tmp/gpug/micro2.py /tmp/r/micro-$n.jsonl /tmp/m/distilbertd.onnx batch=1,seq=128 2>&1 | tail -2; done
sv() { BATCHES="$3" WINDOWS="64:6,64:4,64:4" timeout 60 python3 /tmp/gpug/sv.py /tmp/r/$1.jsonl /tmp/m/distilbertd.onnx batch=1,seq=128 0-9 10-15 > /tmp/r/sv.log 2>&1; echo "$1 $(date +%s)"; grep -o '"plain": .*\|"rows_s": [0-9.]*\|"p50": [0-9.]*\|"blocking_p50.*\|"run_ms.*' /tmp/r/$1.jsonl | tr '\n' ' '; echo; ship; }
lend 3; sv lent d "[64,256]"; lend 1000000000; sv usual d "[64]"; lend 3; ship
