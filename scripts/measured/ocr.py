"""Widths at random. ocr.py OUT MODEL DEVICE ours|plain|heuristic|one"""
import sys, json, time, subprocess
from pathlib import Path
sys.path.insert(0,str(Path.cwd()))
import numpy as np
out,path,device,how=sys.argv[1:5]
rng=np.random.default_rng(5); widths=rng.permutation(np.arange(64,64+24*16,16)); 
feeds={int(w):{"x":rng.standard_normal((1,3,32,int(w)),dtype=np.float32)} for w in widths}
def used():
    try: return int(subprocess.run(["nvidia-smi","-i",__import__("os").environ.get("CUDA_VISIBLE_DEVICES","0"),"--query-gpu=memory.used","--format=csv,noheader,nounits"],capture_output=True,text=True).stdout.split()[0])
    except Exception: return 0
base=used(); row={"how":how,"device":device}
if how in ("ours","one"):
    import rlx_ort
    r=rlx_ort.load(path); run=lambda f: r.run(device,f)
else:
    import onnxruntime as o
    so=o.SessionOptions(); so.log_severity_level=3
    ps=["CPUExecutionProvider"]
    if device=="cuda": ps.insert(0,("CUDAExecutionProvider",{"use_tf32":"0",**({"cudnn_conv_algo_search":"HEURISTIC"} if how=="heuristic" else {})}))
    s=o.InferenceSession(path,so,providers=ps); run=lambda f: s.run(None,f)
def ms(f):
    t=time.perf_counter(); run(f); return (time.perf_counter()-t)*1e3
q=lambda a: {"median":round(float(np.median(a)),2),"p95":round(float(np.percentile(a,95)),2),"max":round(float(np.max(a)),2)}
ws=[int(w) for w in widths]
if how=="one":
    for _ in range(400): run(feeds[ws[0]])
    time.sleep(3)
    for _ in range(100): run(feeds[ws[0]])
    row["used_mb"]=used()-base
else:
    run(feeds[ws[0]]); run(feeds[ws[0]])
    row["first"]=q([ms(feeds[w]) for w in ws[1:]])
    for name,seconds in (("known 0-3 s",3),("known 3-7 s",4),("known after",2)):
        a=[]; end=time.perf_counter()+seconds
        while time.perf_counter()<end: a.append(ms(feeds[int(rng.choice(ws))])); 
        row[name]=q(a)|{"n":len(a)}
    row["used_mb"]=used()-base
open(out,"a").write(json.dumps(row)+"\n"); print(json.dumps(row),flush=True)
