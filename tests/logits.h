// The logits at every position of a text, in one step: what both kinds of reference are compared
// with.
#ifndef LOGITS_H
#define LOGITS_H

// got[n, V]. PRECONDITION: the engine has n slots, since every row of logits needs one.
static void all_logits(Engine* e, const int* ids, int n, float* got) {
  int *id = (int*)xcalloc((size_t)4 * n, sizeof(int)), *pos = id + n, *slot = pos + n,
      *row = slot + n;
  for (int i = 0; i < n; i++) {
    id[i] = ids[i];
    pos[i] = row[i] = i;
  }
  Batch b = {n, n, id, pos, slot, row};
  blocks_grow(&e->blocks, 0, n);
  engine_submit(e, &b);
  engine_collect(e);
  e->device->api->logits(e, n, got);
  blocks_release(&e->blocks, 0);
  free(id);
}
#endif
