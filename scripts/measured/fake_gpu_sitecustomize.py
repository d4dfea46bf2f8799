import os, sys
if "serve" in sys.orig_argv and os.environ.get("FAKE"):
    import time, numpy as np
    from rlx_ort.device import Device
    import rlx_ort.serving.scheduler as S, rlx_ort.serving.lanes as L
    init = S.Scheduler.__init__
    NL, BASE, ROW = [float(x) for x in os.environ["FAKE"].split(",")]
    def cost(r): return (BASE + ROW * r) * 1e6
    class FakeLane(L.Lane):
        def prepare(self, *a): pass
    def make(i):
        out = np.ones((64, 128, 768), np.float32)
        def run(inputs, wanted):
            n = len(inputs["ids"]); time.sleep(cost(n) / 1e9); return {"gather": out[:n]}
        lane = FakeLane(Device(f"cuda:{i}"), run, cost, 64, padding="joined"); lane.learn(1, int(cost(1))); return lane
    def init2(self, lanes, *, batched=True, **kw):
        kw["options"] = S.BatchOptions(max_batch=64)
        init(self, [make(i) for i in range(int(NL))], batched=True, **kw)
    S.Scheduler.__init__ = init2
