# sv TAG TRACE WINDOWS MODEL DIMS BATCHES SERVERCORES CLIENTCORES CARDS
mkdir -p /tmp/site2
cat > /tmp/site2/sitecustomize.py <<'P'
import os, sys
if "serve" in sys.orig_argv:
    import logging
    h = logging.StreamHandler(); h.setFormatter(logging.Formatter("%(asctime)s %(message)s")); l = logging.getLogger("rlx_ort.execution.sized"); l.addHandler(h); l.setLevel(logging.INFO)
    if os.environ.get("TRACE"):
        import atexit, json, time
        import rlx_ort.serving.lanes as L, rlx_ort.serving.scheduler as S
        log = []
        run, note, end = L._run_joined, S.Scheduler._note_arrival, S.Scheduler._end_all
        def run2(lane, batch, rooms, inputs_of):
            a = time.perf_counter_ns(); out = run(lane, batch, rooms, inputs_of); b = time.perf_counter_ns()
            log.append(("r", a, b, sum(x.rows for x in batch), out[0].times.input_ns, out[0].times.infer_ns, round(lane.expected_ns(sum(x.rows for x in batch)))))
            return out
        def note2(self, now, rows): log.append(("a", now)); return note(self, now, rows)
        def end2(self, batch, results): log.append(("e", time.perf_counter_ns(), len(batch))); return end(self, batch, results)
        L._run_joined, S.Scheduler._note_arrival, S.Scheduler._end_all = run2, note2, end2
        start = S.Scheduler._start
        def start2(self, lane, batch, nobody): log.append(("s", time.perf_counter_ns(), sum(x.rows for x in batch), self._waiting, lane.idle, self._returning, round(self._back_ns) if self._back_ns < 1e12 else 0)); return start(self, lane, batch, nobody)
        S.Scheduler._start = start2
        atexit.register(lambda: json.dump(log, open(os.environ["TRACE"], "w")))
P
sv() {
 TRACE=$2 PYTHONPATH=/tmp/site2:$PYTHONPATH RLX_CACHE_DIR=/tmp/cs$9 BATCHES="$6" WINDOWS="$3" timeout 110 python3 /tmp/gpug/sv.py /tmp/r/s$1-$4.jsonl /tmp/m/$4.onnx $5 $7 $8 $9 > /tmp/r/sv-$1-$4.log 2>&1
 echo "== $1 $4 cards $9 $(date +%s)"; grep -o '"plain": .*\|"clients": [0-9]*\|"rows_s": [0-9.]*\|"bad": [1-9][0-9]*\|"blocking_p50.*\|"run_ms.*' /tmp/r/s$1-$4.jsonl | tr '\n' ' ' | cut -c1-700; echo; grep "session of their own" /tmp/r/s$1-$4.jsonl.server | cut -c12-190 | tail -12; tail -1 /tmp/r/sv-$1-$4.log | cut -c1-200; }
W=64:6,64:4,64:4,128:6,128:4,1:3
