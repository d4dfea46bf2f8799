# serving by default: the sessions of sizes tried again after 16, 256 and no times as many runs; with the log of the tries
. /tmp/gpug/part.sh
SC=${SC:-0-9}; CC=${CC:-10-15}; mkdir -p /tmp/site
sv() { # tag rarer windows model dims batches
 printf 'import os, sys\nif os.environ.get("RARER") and "serve" in sys.orig_argv:\n    import rlx_ort.execution.sized as m\n    m.RARER = int(os.environ["RARER"])\n' > /tmp/site/sitecustomize.py
 RARER=$2 PYTHONPATH=/tmp/site:$PYTHONPATH SV_ARGS="-v" RLX_CACHE_DIR=/tmp/cs BATCHES="$6" WINDOWS="$3" timeout 75 python3 /tmp/gpug/sv.py /tmp/r/s$1-$4.jsonl /tmp/m/$4.onnx $5 $SC $CC 0 > /tmp/r/sv-$1-$4.log 2>&1
 echo "== $1 rarer=$2 $4 $(date +%s)"; grep -o '"plain": .*\|"clients": [0-9]*\|"rows_s": [0-9.]*\|"p95": [0-9.]*\|"bad": [1-9][0-9]*\|"blocking_p50.*\|"run_ms.*' /tmp/r/s$1-$4.jsonl | tr '\n' ' ' | cut -c1-700; echo; grep -c "session of their own" /tmp/r/s$1-$4.jsonl.server; grep "session of their own" /tmp/r/s$1-$4.jsonl.server | cut -c1-170 | tail -14; }
sv new "" "64:6,64:4,64:4,128:6,128:4,128:4,1:3" distilbert batch=1,seq=128 "[64,256]"
sv old 16 "64:6,64:4,64:4,128:6,128:4,128:4,1:3" distilbert batch=1,seq=128 "[64]"
sv never 1000000 "64:6,64:4,64:4,128:6,128:4,128:4,1:3" distilbert batch=1,seq=128 "[64]"
sv new "" "64:8,64:4,64:4,1:3" resnet50 batch=1 "[64,256]"
ship
