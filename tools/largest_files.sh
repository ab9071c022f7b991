# The arguments on standard input are not needed. The sandbox shows only files that the agent may read.
set -eu
cd "$TOOLLOOP_WORKSPACE"
find . -type f -printf '%s %P\n' 2>/dev/null | sort -rn | head -n 10
