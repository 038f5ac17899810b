// Damage to a file: bit flips, cuts, copies, removals and insertions, from one fixed seed.

static size_t random_below(size_t n) {
  static uint64_t state = 88172645463325252u;
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return (size_t)(state >> 11) % n;
}

// Into changed, which has room for 120 bytes more. Three of four edits fall in the first `focus`
// bytes, where the structure is.
static size_t mutate(unsigned char* changed, const unsigned char* from, size_t len, size_t focus) {
  static const char PIECES[] = "{}[]\":,0123456789-+.eE\\u\ntfn \xff";
  memcpy(changed, from, len);
  for (size_t edits = 1 + random_below(3); edits > 0 && len > 0; edits--) {
    const size_t range = random_below(4) && focus < len ? focus : len, at = random_below(range);
    const size_t other = random_below(range), left = len - (at > other ? at : other);
    const size_t n = 1 + random_below(left < 40 ? left : 40);
    const size_t kind = random_below(5);
    if (kind == 0) changed[at] ^= (unsigned char)(1 << random_below(8));
    if (kind == 1) changed[at] = (unsigned char)PIECES[random_below(sizeof(PIECES) - 1)];
    if (kind == 2) len = at;
    if (kind == 3) memmove(changed + at, changed + other, n);          // over what was there
    if (kind == 4) memmove(changed + at + n, changed + at, len - at);  // twice
    if (kind == 4) len += n;
  }
  return len;
}
