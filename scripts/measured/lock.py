import asyncio, sys, threading, time, numpy as np, statistics
from concurrent.futures import ThreadPoolExecutor
mode=sys.argv[1]; si=float(sys.argv[2]) if len(sys.argv)>2 else 0.005; W=int(sys.argv[3]) if len(sys.argv)>3 else 2
sys.setswitchinterval(si)
src=np.ones((32,98304),np.float32); mem=memoryview(bytearray(64<<20)); lock=threading.Lock()
pool=ThreadPoolExecutor(W); helper=ThreadPoolExecutor(1)
def place(i):
    with lock: at=i*98304*4
    t=np.ndarray((98304,),np.float32,mem,at); t[...]=src[i]
def part(js):
    for j in js: place(j)
def batch():
    a=time.perf_counter()
    fs=[pool.submit(part,range(k,32,W+1)) for k in range(1,W+1)]
    part(range(0,32,W+1)); [f.result() for f in fs]
    return (time.perf_counter()-a)*1e3
async def main():
    loop=asyncio.get_running_loop(); stop=False
    def poll():
        x=0
        for i in range(150): x+=i*i   # ~10 us of Python
        if not stop: loop.call_soon(poll)
    if mode=="poll": loop.call_soon(poll)
    ts=[]
    for _ in range(60):
        ts.append(await loop.run_in_executor(helper,batch)); await asyncio.sleep(0.002)
    stop=True
    print(mode, si, W, "median ms", round(statistics.median(ts),2), "p90", round(sorted(ts)[54],2))
asyncio.run(main())
