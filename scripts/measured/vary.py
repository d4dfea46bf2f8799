"""First sight of widths under one setting at a time. vary.py OUT MODEL HOW"""
import sys, json, time
from pathlib import Path
sys.path.insert(0,str(Path.cwd()))
import numpy as np
out,path,how=sys.argv[1:4]
rng=np.random.default_rng(5); ws=[int(w) for w in rng.permutation(np.arange(64,64+24*16,16))]
feeds={w:{"x":rng.standard_normal((1,3,32,w),dtype=np.float32)} for w in ws}
later=[w+8 for w in ws]; feeds|={w:{"x":rng.standard_normal((1,3,32,w),dtype=np.float32)} for w in later}
if how.startswith("ours"):
    import rlx_ort
    from rlx_ort import CompileOptions
    o={"ours":{}, "ours-norec":{"device_graph":False}, "ours-nosized":{"sized_sessions":0}, "ours-nojudge":{}, "ours-noalloc":{"session_config":{"session.use_device_allocator_for_initializers":"0"}},"ours-noenv":{}}[how]
    r=rlx_ort.load(path,options=CompileOptions(**o)) if o else rlx_ort.load(path)
    if how=="ours-nojudge":
        import rlx_ort.execution.engine as e
        e.EngineSlot.check_sizes=lambda self,*a: None
    run=lambda f: r.run("cuda",f)
    if how=="ours-noenv":
        import rlx_ort.providers.engine.session as ses
        c=r.compile("cuda"); 
        run=lambda f: c.run(f)
else:
    import onnxruntime as o
    so=o.SessionOptions(); so.log_severity_level=3; opts={"use_tf32":"0","cudnn_conv_algo_search":"HEURISTIC"}; ro=None
    if how in ("alloc","all"): so.add_session_config_entry("session.use_device_allocator_for_initializers","1")
    if how in ("nopattern","all"): so.enable_mem_pattern=False
    if how in ("thread1","all"): so.intra_op_num_threads=1
    if how in ("nofusion","all"): so.add_session_config_entry("optimization.disable_specified_optimizers","MatMulAddFusion")
    if how in ("stream","all"):
        import torch
        st=torch.cuda.Stream(); opts|={"has_user_compute_stream":"1","user_compute_stream":str(st.cuda_stream)}
    if how in ("nosync","all"):
        ro=o.RunOptions(); ro.add_run_config_entry("disable_synchronize_execution_providers","1")
    s=o.InferenceSession(path,so,providers=[("CUDAExecutionProvider",opts),"CPUExecutionProvider"])
    if how=="binding":
        def run(f):
            b=s.io_binding(); b.bind_cpu_input("x",f["x"]); b.bind_output(s.get_outputs()[0].name,"cpu"); s.run_with_iobinding(b); return b.copy_outputs_to_cpu()
    elif how in ("nosync","all"):
        import torch
        def run(f):
            y=s.run(None,f,ro); torch.cuda.synchronize(); return y
    else: run=lambda f: s.run(None,f)
def ms(f):
    t=time.perf_counter(); run(f); return (time.perf_counter()-t)*1e3
run(feeds[ws[0]]); run(feeds[ws[0]])
a=[ms(feeds[w]) for w in ws[1:]]; b=[ms(feeds[w]) for w in later]
again=[ms(feeds[w]) for w in ws]
row={"how":how,"first":round(float(np.median(a)),2),"first_mean":round(float(np.mean(a)),2),"second_set":round(float(np.median(b)),2),"mean2":round(float(np.mean(b)),2),"again":round(float(np.median(again)),2)}
open(out,"a").write(json.dumps(row)+"\n"); print(json.dumps(row),flush=True)
