import atexit, collections, os, sys, threading, time
if os.environ.get("SAMPLE") and "-c" in sys.orig_argv[:6]:
    tally, stop = collections.Counter(), threading.Event()
    def sample():
        me = threading.get_ident()
        while not stop.wait(0.004):
            if time.monotonic() < begun + float(os.environ["SAMPLE"]): continue
            names = {t.ident: t.name for t in threading.enumerate()}
            for ident, frame in sys._current_frames().items():
                if ident == me: continue
                stack = []
                while frame is not None and len(stack) < 5:
                    stack.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}:{frame.f_code.co_name}"); frame = frame.f_back
                tally[names.get(ident, "?")[:28] + " | " + " < ".join(stack)] += 1
            tally["ALL"] += 1
    begun = time.monotonic()
    thread = threading.Thread(target=sample, daemon=True); thread.start()
    def dump():
        stop.set()
        with open(f"/tmp/r/prof-{os.environ.get('SAMPLE_LABEL','')}-{os.getpid()}.txt", "w") as f:
            for k, n in tally.most_common(70): f.write(f"{n} {k}\n")
    atexit.register(dump)
