[ -f /tmp/gpu-env.sh ] || { echo no env; exit 9; }
. /tmp/gpug/part.sh
nproc; nvidia-smi --query-gpu=name,driver_version --format=csv,noheader; echo "$(date +%s) begin" > /tmp/g/done
(part 0 0-11 13 suite suite=520) &
(part 0 12-15 4 models models=500) &
until_done 530 3; pkill -f /gpu_gate.py; ship; cat /tmp/g/done; tail -qn 1 /tmp/g/*.log | cut -c1-300
