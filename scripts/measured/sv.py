"""Serving by default. sv.py OUT MODEL.onnx DIMS SERVERCORES CLIENTCORES [device label of cards]"""
import sys, os, json, time, subprocess, socket, statistics, threading, urllib.request, re
from pathlib import Path
ROOT=Path.cwd(); sys.path[:0]=[str(ROOT),str(ROOT/"scripts"),str(ROOT/"tests/helpers")]
import numpy as np
def tensors(dims,path):
    import onnx
    m=onnx.load(path,load_external_data=False); out=[]; rng=np.random.default_rng(1)
    inits={i.name for i in m.graph.initializer}
    for v in m.graph.input:
        if v.name in inits: continue
        sh=[d.dim_value or dims.get(d.dim_param,1) for d in v.type.tensor_type.shape.dim]; sh[0]=1
        if v.type.tensor_type.elem_type==1: out.append((v.name,"FP32",rng.standard_normal(sh).astype(np.float32)))
        else: out.append((v.name,"INT64",np.ones(sh,np.int64)))
    return out
def body(model,ts,host):
    en=[{"name":n,"shape":list(a.shape),"datatype":k,"parameters":{"binary_data_size":a.nbytes}} for n,k,a in ts]
    head=json.dumps({"inputs":en,"parameters":{"binary_data_output":True}}).encode(); b=head+b"".join(a.tobytes() for *_,a in ts)
    return "\r\n".join([f"POST /v2/models/{model}/infer HTTP/1.1",f"Host: {host}",f"Inference-Header-Content-Length: {len(head)}",f"Content-Length: {len(b)}","",""]).encode()+b
if sys.argv[1]=="client":
    import asyncio
    try:
        import uvloop; uvloop.install()
    except Exception: pass
    port,n,seconds,req=int(sys.argv[2]),int(sys.argv[3]),float(sys.argv[4]),Path(sys.argv[5]).read_bytes()
    lat=[]
    async def one(end):
        r,w=await asyncio.open_connection("127.0.0.1",port,limit=1<<24)
        while time.time()<end:
            t=time.perf_counter(); w.write(req); h=(await r.readuntil(b"\r\n\r\n")).lower()
            await r.readexactly(int(h.split(b"\r\ncontent-length:")[1].split(b"\r\n")[0]))
            if h[9:12]!=b"200": lat.append(-1.0)
            else: lat.append(time.perf_counter()-t)
        w.close()
    async def go():
        end=time.time()+seconds; await asyncio.gather(*(one(end) for _ in range(n)))
    t=time.time(); asyncio.run(go()); good=[x for x in lat if x>0]
    print(json.dumps({"n":len(good),"bad":len(lat)-len(good),"s":seconds,"p50":float(np.percentile(good,50)*1e3) if good else 0,"p95":float(np.percentile(good,95)*1e3) if good else 0,"cpu":round(time.process_time(),2)})); sys.exit()
out=open(sys.argv[1],"w"); path=sys.argv[2]; dims={k:int(v) for k,v in (e.split("=") for e in sys.argv[3].split(",") if e)}
sc,cc=sys.argv[4],sys.argv[5]; cards=sys.argv[6] if len(sys.argv)>6 else "0"
def put(**r): out.write(json.dumps(r)+"\n"); out.flush(); print(json.dumps(r)[:400],flush=True)
ts=tensors(dims,path); model=Path(path).stem
plain='''
import onnxruntime as o,numpy as np,time,json,sys
so=o.SessionOptions(); so.log_severity_level=3
s=o.InferenceSession(sys.argv[1],so,providers=[("CUDAExecutionProvider",{"use_tf32":"0"}) if "CUDAExecutionProvider" in o.get_available_providers() else "CPUExecutionProvider","CPUExecutionProvider"])
dims=json.loads(sys.argv[2]); res={}
for b in json.loads(sys.argv[3]):
    f={i.name:(np.random.rand(b,*[d if isinstance(d,int) else dims.get(d,1) for d in i.shape[1:]]).astype(np.float32) if i.type=="tensor(float)" else np.ones((b,*[d if isinstance(d,int) else dims.get(d,1) for d in i.shape[1:]]),np.int64)) for i in s.get_inputs()}
    for _ in range(4): s.run(None,f)
    t=time.perf_counter(); n=0
    while time.perf_counter()-t<1.0: s.run(None,f); n+=1
    res[b]=round(n*b/(time.perf_counter()-t),1)
print(json.dumps(res))
'''
env=dict(os.environ,CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES",cards))
env1=dict(env,CUDA_VISIBLE_DEVICES=env["CUDA_VISIBLE_DEVICES"].split(",")[0])
batches=json.loads(os.environ.get("BATCHES","[1,16,32,48,64,128,256]"))
p=subprocess.run(["taskset","-c",sc,sys.executable,"-c",plain,path,json.dumps(dims),json.dumps(batches)],env=env1,capture_output=True,text=True,timeout=120)
put(plain=p.stdout.strip()[-400:],err=p.stderr[-200:] if p.returncode else "")
direct=f'''
import sys,json,time,statistics; sys.path.insert(0,{str(ROOT)!r})
import numpy as np, rlx_ort
ts=np.load(sys.argv[2]); f={{n:ts[n] for n in ts.files}}
with rlx_ort.load(sys.argv[1]) as r:
    d=sys.argv[3]
    for _ in range(400): r.run(d,f)
    t=[]
    for _ in range(600):
        a=time.perf_counter(); r.run(d,f); t.append((time.perf_counter()-a)*1e3)
    print(json.dumps(statistics.median(t)))
'''
np.savez(str(Path(sys.argv[1]).with_suffix(".npz")),**{n:a for n,_,a in ts})
dev=os.environ.get("SV_DEVICE","cuda")
with socket.socket() as s: s.bind(("127.0.0.1",0)); port=s.getsockname()[1]
log=open(sys.argv[1]+".server","w")
def serve(env,extra=tuple(os.environ.get("SV_ARGS","").split())):
    return subprocess.Popen(["taskset","-c",sc,sys.executable,"-P","-c",f"import sys; sys.path.insert(0,{str(ROOT)!r}); from rlx_ort.cli import main; main()","serve",path,"--grpc","-1","--http-port",str(port),*extra],env=env,stdout=log,stderr=log)
def ready(seconds=90):
    end=time.time()+seconds
    while time.time()<end:
        try:
            if urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready",timeout=2).status==200: return True
        except Exception: time.sleep(0.3)
    return False
def metrics():
    t=urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics",timeout=5).read().decode(); g={}
    for l in t.splitlines():
        if l.startswith(("rlx_inference_batch_rows","rlx_inference_device_busy","rlx_inference_exec_count","rlx_inference_queue","rlx_inference_compute","rlx_inference_request_dur","rlx_inference_output","rlx_inference_input","rlx_inference_count")) and "bucket" not in l.replace("batch_rows_bucket",""): k,v=l.rsplit(" ",1); g[k]=float(v)
    return g
req=Path(sys.argv[1]).with_suffix(".req"); req.write_bytes(body(model,ts,f"127.0.0.1:{port}"))
def cpu():
    import psutil
    try:
        top=psutil.Process(srv.pid); return {f"{p.pid}{' '.join(p.cmdline()[-2:])[-30:]}":sum(p.cpu_times()[:2]) for p in [top,*top.children(recursive=True)]}
    except Exception as e: return {"?":0}
def window(n,seconds):
    procs=8 if n>=8 else 1; a=metrics(); ca=cpu()
    ps=[subprocess.Popen(["taskset","-c",cc,sys.executable,__file__,"client",str(port),str(n//procs),str(seconds),str(req)],stdout=subprocess.PIPE,text=True,env=env) for _ in range(procs)]
    rs=[]
    for q in ps:
        try: rs.append(json.loads(q.communicate(timeout=seconds+40)[0]))
        except Exception as e: put(client_error=repr(e)[:100])
    cb=cpu(); b=metrics(); d={re.sub(r'model="[^"]*",|version="[^"]*",?',"",k):round(b[k]-a.get(k,0),3) for k in b if b[k]!=a.get(k,0) and "created" not in k}
    put(clients=n,rows_s=round(sum(r["n"] for r in rs)/seconds,1),bad=sum(r["bad"] for r in rs),p50=statistics.median(r["p50"] for r in rs),p95=max(r["p95"] for r in rs),client_cpu=round(sum(r["cpu"] for r in rs)/seconds,2),metrics=d,cpu={k[:7]:round((cb[k]-ca.get(k,0))/seconds,2) for k in cb})
# cards: as many as visible
srv=serve(env1 if "," not in cards else env)
if not ready(): put(error="not ready"); srv.kill(); sys.exit(1)
for n,sec in [tuple(map(float,w.split(":"))) for w in os.environ.get("WINDOWS","64:10,64:4,64:4,128:6,128:4,64:4,1:3,1:3").split(",")]: window(int(n),sec)
# a blocking client
s=socket.create_connection(("127.0.0.1",port)); s.setsockopt(socket.IPPROTO_TCP,socket.TCP_NODELAY,1); data=req.read_bytes(); lat=[]
for _ in range(500):
    t=time.perf_counter(); s.sendall(data); buf=b""
    while b"\r\n\r\n" not in buf: buf+=s.recv(1<<20)
    h,rest=buf.split(b"\r\n\r\n",1); n=int(h.lower().split(b"\ncontent-length:")[1].split(b"\r\n")[0])
    got=len(rest)
    while got<n: got+=len(s.recv(1<<20))
    lat.append((time.perf_counter()-t)*1e3)
put(blocking_p50=statistics.median(lat[100:]))
srv.terminate()
try: srv.wait(15)
except Exception: srv.kill()
p=subprocess.run(["taskset","-c",sc,sys.executable,"-c",direct,path,str(Path(sys.argv[1]).with_suffix(".npz")),dev],env=env1,capture_output=True,text=True,timeout=90); put(run_ms=p.stdout.strip(),err=p.stderr[-200:] if p.returncode else "")
