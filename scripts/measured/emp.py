"""ONNX's cases without elements of one operator: emp.py DEVICE WORD"""
import sys; from pathlib import Path
R=Path.cwd(); sys.path[:0]=[str(R), str(R/"tests"/"helpers")]
from onnx_suite.emptied import emptied_cases, verdicts
def main():
  cases=[c for c in emptied_cases(each=True) if sys.argv[2] in c[0]]
  print(len(cases), "cases", flush=True)
  counts, failures = verdicts(sys.argv[1], cases)
  print(*failures, dict(counts), sep="\n")
if __name__ == "__main__": main()
