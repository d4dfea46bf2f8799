"""Models in their real sizes with random weights. exp.py OUTDIR EXPORTER names... (peers.toml's, and distilbert)"""
import sys; from pathlib import Path
sys.path[:0] = [str(Path.cwd() / "scripts"), str(Path.cwd()), str(Path.cwd() / "tests/helpers")]
import onnx, peers, user_models
peers.TABLES["models"]["distilbert"] = {"class": "DistilBertModel", "seq": 128}
out = Path(sys.argv[1]); out.mkdir(parents=True, exist_ok=True)
for n in sys.argv[3:]:
    if (out / f"{n}.onnx").exists(): continue
    built = peers.architecture(n); m = user_models.export(built, sys.argv[2], 17 if sys.argv[2] == "torchscript" else None, peers.arrays(built, 2, peers.TABLES["models"][n].get("seq", 1)))
    onnx.save(m, str(out / f"{n}.part")); (out / f"{n}.part").rename(out / f"{n}.onnx"); print(n, flush=True)
