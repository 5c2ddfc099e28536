# shellcheck shell=bash
# Set PYTHON and PYTHONPATH for the programs in this folder; $root is the repository. Packages that $PYTHON lacks are
# installed from the wheels in .gpu-wheels (GPU_WHEELS names another folder) into a separate folder in PYTHONPATH.
PYTHON=${PYTHON:-python3}
wheels=${GPU_WHEELS:-${root:?}/.gpu-wheels}

is_complete() {
  "$PYTHON" -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))' \
    deepspeed orjson zstandard fla
}
if compgen -G "$wheels/*.whl" > /dev/null && ! is_complete; then
  site=${GPU_SITE:-${TMPDIR:-/tmp}/megatron-gpu-site-$(id -u)}
  stamp=$("$PYTHON" --version; cat "$wheels"/*.whl | cksum; ls "$wheels")
  if [ "$stamp" != "$(cat "$site/.stamp" 2> /dev/null)" ]; then      # equal: an earlier start has installed these wheels
    if [ -e "$site/.stamp" ]; then rm -rf "$site"; fi                    # remove only a folder that this script has made
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl || {
      echo "error: the wheels in $wheels are not for $("$PYTHON" --version) (see above). On a machine with a network:" \
        "bash benchmarks/gpu/run.sh wheels --python X.Y" >&2
      exit 1
    }
    # now, by all cores: otherwise all processes of a step compile DeepSpeed at once at their first import
    "$PYTHON" -m compileall -q -j 0 "$site" > /dev/null || true
    printf '%s\n' "$stamp" > "$site/.stamp"
  fi
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
