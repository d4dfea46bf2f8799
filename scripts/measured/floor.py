"""One client: the server, a bare asyncio echo of the same bytes, and runs. floor.py OUT MODEL DIMS"""
import sys, os, json, time, socket, subprocess, statistics, urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
ROOT=Path.cwd(); sys.path[:0]=[str(ROOT)]
import numpy as np
src=open(os.path.join(os.path.dirname(os.path.abspath(__file__)),"sv.py")).read().split("if sys.argv[1]==\"client\"")[0]
A=sys.argv[:]; exec(src); sys.argv=A
out,path,dims=A[1],A[2],{k:int(v) for k,v in (e.split("=") for e in A[3].split(",") if e)}
DEV=os.environ.get("SV_DEVICE","cuda")
def blocking(port,data,n):
    s=socket.create_connection(("127.0.0.1",port)); s.setsockopt(socket.IPPROTO_TCP,socket.TCP_NODELAY,1); lat=[]; sizes=0
    for _ in range(n):
        t=time.perf_counter(); s.sendall(data); buf=b""
        while b"\r\n\r\n" not in buf: buf+=s.recv(1<<20)
        h,rest=buf.split(b"\r\n\r\n",1); k=int(h.lower().split(b"\r\ncontent-length:")[1].split(b"\r\n")[0]); got=len(rest); sizes=k
        if h[9:12]!=b"200": raise SystemExit(buf[:300])
        while got<k: got+=len(s.recv(1<<20))
        lat.append((time.perf_counter()-t)*1e3)
    s.close(); return statistics.median(lat[n//3:]), sizes
ECHO='''
import asyncio,sys
R=b"HTTP/1.1 200 OK\\r\\ncontent-length: %d\\r\\n\\r\\n"%int(sys.argv[2])+bytes(int(sys.argv[2]))
class P(asyncio.Protocol):
    def connection_made(s,t): s.t=t; s.n=0; s.need=-1
    def data_received(s,d):
        if s.need<0:
            i=d.find(b"\\r\\n\\r\\n"); s.need=i+4+int(d[:i].lower().split(b"\\r\\ncontent-length:")[1].split(b"\\r\\n")[0]); s.n=0
        s.n+=len(d)
        if s.n>=s.need: s.need=-1; s.t.write(R)
async def main():
    l=asyncio.get_running_loop(); sv=await l.create_server(P,"127.0.0.1",int(sys.argv[1])); await sv.serve_forever()
asyncio.run(main())
'''
name=Path(path).stem; ts=tensors(dims,path)
with socket.socket() as s: s.bind(("127.0.0.1",0)); port=s.getsockname()[1]
srv=subprocess.Popen([sys.executable,"-P","-c",f"import sys; sys.path.insert(0,{str(ROOT)!r}); from rlx_ort.cli import main; main()","serve",path,"--grpc","-1","--http-port",str(port)],stdout=open(out+".server","w"),stderr=subprocess.STDOUT)
for _ in range(600):
    try:
        if urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready",timeout=2).status==200: break
    except Exception: time.sleep(0.1)
data=body(name,ts,f"127.0.0.1:{port}")
blocking(port,data,600); _,size=blocking(port,data,600)
e=subprocess.Popen([sys.executable,"-c",ECHO,str(port+1),str(size)])
for _ in range(100):
    try: socket.create_connection(("127.0.0.1",port+1),timeout=1).close(); break
    except OSError: time.sleep(0.05)
served=[]; echo=[]
for _ in range(3): served.append(round(blocking(port,data,400)[0],3)); echo.append(round(blocking(port+1,data,400)[0],3))
srv.terminate(); e.terminate(); srv.wait(30); e.wait()
import rlx_ort
f={n:a for n,_,a in ts}
def med(call,n=400):
    t=[]
    for _ in range(n): a=time.perf_counter(); call(); t.append((time.perf_counter()-a)*1e3)
    return round(statistics.median(t[n//3:]),3)
def spaced(gap):
    def one():
        end=time.perf_counter()+gap
        while time.perf_counter()<end: pass
    t=[]
    for _ in range(300):
        one(); a=time.perf_counter(); r.run(DEV,f); t.append((time.perf_counter()-a)*1e3)
    return round(statistics.median(t[100:]),3)
with rlx_ort.load(path) as r:
    for _ in range(400): r.run(DEV,f)
    run=med(lambda: r.run(DEV,f)); gaps={g:spaced(g/1e3) for g in (0.3,0.6,1.0)}
    fresh=[{n:np.array(a) for n,a in f.items()} for _ in range(64)]; k=iter(range(10**9))
    cold=med(lambda: r.run(DEV,fresh[next(k)%64]))
    with ThreadPoolExecutor(1) as p: hop=med(lambda: p.submit(r.run,DEV,f).result()); nothing=med(lambda: p.submit(int).result())
row=dict(model=name,bytes=len(data),answer=size,served=served,echo=echo,run=run,gaps=gaps,other_inputs=cold,in_thread=hop,empty_hop=nothing)
open(out,"a").write(json.dumps(row)+"\n"); print(json.dumps(row),flush=True)
