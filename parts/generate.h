// ---- Texts: bs generate, all prompts in one continuous batch.

// What the new tokens say, up to the one that ended them; special tokens are no text. To be freed.
static char* decode(const Tokenizer* t, const Request* r, size_t* length) {
  const int *ids = r->tokens + r->n_prompt, n = r->n_new - r->ended;
  *length = 0;
  for (int i = 0; i < n; i++) *length += (size_t)t->tokens[ids[i]].n;
  char *text = (char*)xcalloc(*length + 1, 1), *to = text;
  for (int i = 0; i < n; i++) {
    const Token* token = &t->tokens[ids[i]];
    if (token->special || token->n == 0) continue;
    memcpy(to, token->text, (size_t)token->n);
    to += token->n;
  }
  *length = (size_t)(to - text);
  return text;
}

static void print_continuation(const Tokenizer* t, const Request* r, const char* prompt,
                               bool json) {
  size_t length;
  char* text = decode(t, r, &length);
  if (!json) {
    fputs(prompt, stdout);
    fwrite(text, 1, length, stdout);
    fputs("\n\n", stdout);
  } else {
    put(stdout, JSON, "{'prompt': %s, 'text': ", prompt);
    put_json_bytes(stdout, text, length);
    printf(", \"ids\": [");
    for (int i = 0; i < r->n_new; i++) printf("%s%d", i ? ", " : "", r->tokens[r->n_prompt + i]);
    printf("], \"finish\": \"%s\"}\n", r->ended                ? "eos"
                                       : r->status == FINISHED ? "length"
                                                               : "interrupted");
  }
  free(text);
}

// Prompt i as a request. False: err says why it can never run.
static bool prompt_request(Request* r, const Tokenizer* t, const Config* c, const Options* o,
                           const char* prompt, int i, char* err) {
  const size_t bytes = strlen(prompt);
  int* ids = (int*)xcalloc(bytes + 4, sizeof(int));
  const int n = encode(t, prompt, bytes, ids, err), out = o->output_len;
  const bool fits = n >= 0 && (long)n + out <= c->max_context;
  if (n >= 0 && !fits)
    say(err, ERR_LEN, "prompt %d has %d tokens; with %d new ones it exceeds %s's context of %d",
        i + 1, n, out, c->name, c->max_context);
  if (fits) {
    make_request(r, c, n, out, (uint32_t)o->seed, i);
    r->temperature = (float)o->temperature;
    memcpy(r->tokens, ids, (size_t)n * sizeof(int));
  }
  free(ids);
  return fits;
}

static int generate_texts(Session* s, const Options* o, const Tokenizer* t, const char** prompts,
                          int n) {
  char err[ERR_LEN];
  int longest = 0, out = o->output_len;
  Limits limits = batch_limits(n, o->step_tokens);
  Workload w = {(Request*)xcalloc(n, sizeof(Request)), n, POLICY_CONTINUOUS, limits, true, NULL};
  for (int i = 0; i < n; i++) {
    if (!prompt_request(&w.requests[i], t, &s->model.config, o, prompts[i], i, err)) {
      free_requests(w.requests, n);
      return give_up(2, err);
    }
    longest = w.requests[i].n_prompt > longest ? w.requests[i].n_prompt : longest;
  }
  Engine e;
  RunStats stats;
  memset(&stats, 0, sizeof stats);
  EngineSize size = {o->step_tokens, n, longest + out, 0};
  if (!weights_open(&s->weights, &s->device, &s->model, matmul_of(o->matmul), longest + out, err) ||
      engine_open(&e, &s->device, &s->weights, size, err) != ROW_OK) {
    free_requests(w.requests, n);
    return give_up(1, err);
  }
  run_requests(&e, &w, INFINITY, &stats);
  free(stats.spans);
  for (int i = 0; i < n; i++) print_continuation(t, &w.requests[i], prompts[i], o->json);
  engine_close(&e);
  free_requests(w.requests, n);
  return 0;
}

static int cmd_generate(Session* s, const Options* o) {
  char err[ERR_LEN], path[PATH_LEN];
  const Config* c = &s->model.config;
  const char *prompts[MAX_PROMPTS], *dir = choose_model(s, o);
  Tokenizer t;
  int n = o->n_prompts;
  for (int i = 0; i < n; i++) prompts[i] = o->prompts[i];
  snprintf(path, sizeof path, "%s/tokenizer.json", dir);
  if (c->vocab_size != 256 && access(path, F_OK) != 0) {
    say(err, sizeof err,
        "generate needs a tokenizer.json beside the model, or a vocabulary of 256, which are "
        "bytes; "
        "%s has %d",
        c->name, c->vocab_size);
    return give_up(2, err);
  }
  if (!load_tokenizer(dir, c->vocab_size, &t, err)) return give_up(1, err);
  if (o->prompts_file && (n = read_prompts(o->prompts_file, prompts, err)) < 0) {
    free_tokenizer(&t);
    return give_up(1, err);
  }
  const int status = generate_texts(s, o, &t, prompts, n);
  for (int i = 0; i < n && o->prompts_file; i++) free((void*)prompts[i]);
  free_tokenizer(&t);
  return status;
}
