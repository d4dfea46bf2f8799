"""Do recordings of one session survive changes of sizes? lead.py OUT MODEL(path or corpus name) FUSIONS(on|off) HOLD(1|0) SEARCH [SIZED]"""
import sys, json, time, ctypes, collections, re
from dataclasses import replace
from pathlib import Path
ROOT=Path.cwd(); sys.path[:0]=[str(ROOT),str(ROOT/"tests/helpers")]
import numpy as np
out,model,fus,hold,search=sys.argv[1:6]; sized=int(sys.argv[6]) if len(sys.argv)>6 else 0
import rlx_ort
from rlx_ort import CompileOptions
from rlx_ort.providers import cuda
from rlx_ort.providers.engine import cuda_driver as cd, recordings
from rlx_ort.providers.engine.recipe import SessionRecipe
row={"model":Path(model).name,"fusions":fus,"hold":hold,"search":search,"sized":sized}
real=cuda.open_session; opened=[]
def opening(recipe, request):
    if hold=="1": recipe=replace(recipe,replans=False)
    if fus=="off": recipe=replace(recipe,leaves_out=(*recipe.leaves_out,"ConvActivationFusion","ConvAddActivationFusion"))
    if fus=="off2": recipe=replace(recipe,leaves_out=(*recipe.leaves_out,"ConvActivationFusion","ConvAddActivationFusion","ConvAddFusion"))
    if search!="-": recipe=replace(recipe,options={**recipe.options,"cudnn_conv_algo_search":search})
    t=time.perf_counter(); s=real(recipe,request); opened.append(round(time.perf_counter()-t,3)); return s
cuda.open_session=opening
recordings.MOST_RECORDED_BYTES=2<<30
class KP(ctypes.Structure):
    _fields_=[("func",ctypes.c_void_p),("g",ctypes.c_uint*7),("params",ctypes.c_void_p),("extra",ctypes.c_void_p),("kern",ctypes.c_void_p),("ctx",ctypes.c_void_p)]
names=collections.Counter(); check=cd._check_nodes
def checked(graph, own, hb):
    d=cd._driver(); n=ctypes.c_size_t(); d.cuGraphGetNodes(graph,None,ctypes.byref(n)); nodes=(ctypes.c_void_p*n.value)(); d.cuGraphGetNodes(graph,ctypes.byref(nodes),ctypes.byref(n))
    for node in nodes:
        k=ctypes.c_int(); d.cuGraphNodeGetType(ctypes.c_void_p(node),ctypes.byref(k))
        if k.value==0:
            p=KP(); f=d.cuGraphKernelNodeGetParams_v2; f.argtypes=[ctypes.c_void_p,ctypes.c_void_p]
            r=f(node,ctypes.byref(p)); s=ctypes.c_char_p()
            if p.func:
                g=d.cuFuncGetName; g.argtypes=[ctypes.c_void_p,ctypes.c_void_p]; g(ctypes.byref(s),p.func)
            if not s.value and p.kern:
                g=d.cuKernelGetName; g.argtypes=[ctypes.c_void_p,ctypes.c_void_p]; g(ctypes.byref(s),p.kern)
            names[(s.value or b"?%d"%r).decode()[:110]]+=1
    return check(graph,own,hb)
cd._check_nodes=checked
def used():
    return (cd.process_bytes(0) or (0,))[0]>>20
rng=np.random.default_rng(5)
if model.endswith(".onnx"):
    raw=model; ws=[int(w) for w in rng.permutation(np.arange(64,64+24*16,16))]
    if "ocr" in model: feeds={w:{"x":rng.standard_normal((1,3,32,w),dtype=np.float32)} for w in ws}
    else:
        import onnx; i=[v for v in onnx.load(model,load_external_data=False).graph.input][0]; dims=[d.dim_value for d in i.type.tensor_type.shape.dim]
        ws=[1,2,3,4,5,6,8,12]; feeds={w:{i.name:rng.standard_normal((w,*dims[1:]),dtype=np.float32)} for w in ws}
else:
    from model_corpus import corpus, user_model
    m=user_model(model); raw="/tmp/lead-%s.onnx"%model; Path(raw).write_bytes(m.model())
    ws=[1,2,3,4,5,6,8,12]
    vary="crnn" in model or "unet" in model
    feeds={w:m.feeds({"batch":1,"width":32+16*w,"height":32+16*w} if vary else {"batch":w}) for w in ws}
import onnxruntime as o
so=o.SessionOptions(); so.log_severity_level=4
ref=o.InferenceSession(raw,so,providers=["CPUExecutionProvider"]); want={w:ref.run(None,f) for w,f in feeds.items()}; del ref
base=used()
try:
    r=rlx_ort.load(raw,options=CompileOptions(sized_sessions=sized)); run=lambda f: r.run("cuda",f)
    worst=0.0; bad=collections.Counter()
    def ms(w):
        global worst
        t=time.perf_counter(); y=run(feeds[w]); t=(time.perf_counter()-t)*1e3
        for a,b in zip(y,want[w]):
            a,b=np.asarray(a),np.asarray(b)
            if a.shape!=b.shape: bad[w]+=1; continue
            if a.dtype.kind=="f" and a.size:
                e=float(np.abs(a-b).max()/max(1e-9,np.abs(b).max())); worst=max(worst,e)
                if not e<2e-3: bad[w]+=1
        return t
    q=lambda a: [round(float(np.median(a)),2),round(float(np.percentile(a,95)),2),round(float(np.max(a)),2)]
    ms(ws[0]); ms(ws[0]); row["mb_one"]=None
    for _ in range(60): ms(ws[0])
    row["one"]=q([ms(ws[0]) for _ in range(60)]); row["mb_one"]=used()-base
    row["first"]=q([ms(w) for w in ws[1:]])
    for s in (2,4,3):
        a=[]; end=time.perf_counter()+s
        while time.perf_counter()<end: a.append(ms(int(rng.choice(ws))))
        row[f"after{len([k for k in row if k.startswith('after')])}"]=q(a)+[len(a)]
    row["mb"]=used()-base; row["bad"]=dict(bad); row["worst"]=worst; row["opened"]=opened[:30]
    c=r.compile("cuda"); rep=c.device_graph_report(); row["recorded"]=len(rep.recorded); row["refused"]=list(rep.refused.values())[:3]; row["reason"]=rep.reason
except Exception as e: row["error"]=f"{type(e).__name__}: {str(e)[:200]}"
fin=sorted(names.items(),key=lambda kv:-kv[1]); row["kernels"]=[f"{n}x {k}" for k,n in fin[:60]] if hold=="1" else len(fin)
open(out,"a").write(json.dumps(row)+"\n"); print(json.dumps({k:v for k,v in row.items() if k!="kernels"}),flush=True)
import os; os._exit(0)
