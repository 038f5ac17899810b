// ---- Options: one table gives the parser, the defaults and --help, so that they cannot disagree.
// What may vary between runs, and what is held fixed, is article 1, section 3.

// Lengths of prompts and outputs: one number or a distribution.
typedef enum { DIST_NONE, DIST_FIXED, DIST_UNIFORM, DIST_LOGNORMAL, DIST_EXP } DistKind;
typedef struct {
  DistKind kind;
  double a, b;  // the length; lowest and highest; mean and sigma; mean
  double cap;   // longer ones are cut to this; 0 = none
} Dist;

// "128", "uniform:32-512", "lognormal:128,1.0", "exp:128", each with an optional "@cap".
static bool parse_dist(const char* text, Dist* d) {
  static const char* const names[] = {"", "", "uniform:", "lognormal:", "exp:"};
  char* end = (char*)text;
  memset(d, 0, sizeof *d);
  for (int kind = DIST_EXP; d->kind == DIST_NONE; kind--)
    if (strncmp(text, names[kind], strlen(names[kind])) == 0) d->kind = (DistKind)kind;
  end += strlen(names[d->kind]);
  if (strspn(end, "0123456789.,-@") != strlen(end) || !isdigit((unsigned char)*end)) return false;
  d->a = strtod(end, &end);
  if (d->kind == DIST_UNIFORM || d->kind == DIST_LOGNORMAL) {
    if (*end != (d->kind == DIST_UNIFORM ? '-' : ',')) return false;
    if (!isdigit((unsigned char)end[1])) return false;
    d->b = strtod(end + 1, &end);
  }
  if (*end == '@') {
    if (!isdigit((unsigned char)end[1])) return false;
    d->cap = strtod(end + 1, &end);
    if (!(d->cap >= 1 && d->cap <= MOST_TOKENS)) return false;
  }
  bool whole = d->kind != DIST_FIXED || (d->a == floor(d->a) && d->cap == 0);
  bool order = d->kind != DIST_UNIFORM || (d->a <= d->b && d->b <= MOST_TOKENS);
  return *end == '\0' && whole && order && d->a >= 1 && d->a <= MOST_TOKENS &&
         (d->kind != DIST_LOGNORMAL || d->b <= 5);
}

// A command is bit i of an option's `commands`, i its place in this list.
static const char command_names[] = "sweep|compare|generate|plan|knee";
enum {
  CMD_SWEEP = 1,
  CMD_COMPARE = 2,
  CMD_GENERATE = 4,
  CMD_PLAN = 8,
  CMD_KNEE = 16,
  CMD_RUN = CMD_SWEEP | CMD_COMPARE | CMD_GENERATE,
  CMD_CURVE = CMD_SWEEP | CMD_PLAN | CMD_KNEE,
  CMD_REPORT = CMD_CURVE | CMD_COMPARE,
  CMD_ALL = CMD_RUN | CMD_CURVE
};
enum { MAX_BATCHES = 32, MAX_PROMPTS = 256 };

typedef struct {
  int command;
  const char *command_name, *device, *model, *matmul, *percentile, *prompts_file, *out;
  const char* prompts[MAX_PROMPTS];
  int n_prompts, n_batches, batches[MAX_BATCHES];  // batches ascend
  int n_kv_heads, kv_heads[MAX_BATCHES];           // plan: what if there were so many
  const char* kv;                                  // "fp16" or "fp8"
  const char* file;                                // knee
  int cards;                                       // plan; 0: as few as hold the model
  bool percentile_given;
  // What is 0, DIST_NONE or "" after parsing is chosen for the device: fill_defaults.
  Dist input, output;
  int input_len, output_len, repeats, step_tokens;
  int seed;
  uint64_t vram;  // bytes; 0: all there is
  double temperature;
  KneeRules rules;
  bool json, quiet, help, version;
  const char *trace, *policy, *input_text, *output_text;
  int policies;  // bit i: Policy i
  int n_requests, max_batch, max_input_len, max_new_tokens, max_total_tokens, kv_tokens;
  double rate, burstiness, timeout_s, batch_wait_s, kv_watermark_pct;
} Options;

typedef enum { INT, REAL, SIZE, LIST, PROMPT, TEXT, CHOICE, FLAG, HEADING, LENGTH } OptionType;
typedef struct {
  const char *name, *arg, *def;  // def is parsed like a given value; "": the field stays zero
  OptionType type;
  size_t offset;
  double lo, hi;
  int commands;
  const char* help;
} Option;

#define AT(field) offsetof(Options, field)
static const Option option_table[] = {
    {"\nMachine", "", "", HEADING, 0, 0, 0, CMD_ALL, ""},
    {"--device", "auto|cuda|cpu|sim:GPU", "auto", TEXT, AT(device), 0, 0, CMD_ALL,
     "auto: a GPU if any; sim:h100, ...: a virtual clock (sim:? lists them)"},
    {"--model", "DIR|PRESET", "", TEXT, AT(model), 0, 0, CMD_ALL, "(default: fits the device)"},
    {"--matmul", "auto|naive|gemv|reuse|mma", "auto", CHOICE, AT(matmul), 0, 0, CMD_RUN,
     "GPU kernel (sim: naive and gemv read the weights per token, reuse per 8)"},
    {"--kv", "fp16|fp8", "fp16", CHOICE, AT(kv), 0, 0, CMD_ALL,
     "numbers in the KV cache (GPU, sim)"},
    {"--vram", "512M|6.5G|...", "", SIZE, AT(vram), 1e6, 1e18, CMD_ALL,
     "pretend memory is smaller"},
    {"--gpus", "N", "", INT, AT(cards), 1, 1024, CMD_PLAN | CMD_KNEE,
     "as ideal tensor parallelism (default: the fewest that hold it)"},
    {"\nWorkload", "", "", HEADING, 0, 0, 0, CMD_ALL, ""},
    {"--batches", "1,2,4,...", "", LIST, AT(n_batches), 1, 32768, CMD_SWEEP | CMD_PLAN,
     "batch sizes to measure"},
    {"--input-len", "N|DIST", "", LENGTH, AT(input), 1, MOST_TOKENS, CMD_REPORT,
     "prompt tokens (CPU 32, GPU 128; compare: lognormal around it)"},
    {"--output-len", "N|DIST", "", LENGTH, AT(output), 1, MOST_TOKENS, CMD_ALL,
     "new tokens (CPU 32, GPU 128; compare: exp of it; generate 512)"},
    {"--repeats", "N", "", INT, AT(repeats), 1, 1000, CMD_SWEEP, "runs per batch (CPU 1, GPU 3)"},
    {"--step-tokens", "N", "", INT, AT(step_tokens), 1, 32768, CMD_ALL,
     "most tokens in a step: decodes, then prompts (CPU 256, GPU 4096)"},
    {"--seed", "N", "0", INT, AT(seed), 0, 2e9, CMD_RUN, "of random weights, prompts, sampling"},
    {"\nWhat if", "", "", HEADING, 0, 0, 0, CMD_PLAN, ""},
    {"--kv-heads", "1,8,...", "", LIST, AT(n_kv_heads), 1, 1024, CMD_PLAN,
     "key/value heads: MQA, GQA, MHA; several are compared"},
    {"\nRequests (DIST: uniform:32-512, lognormal:128,1.0, exp:128, each with @longest)", "", "",
     HEADING, 0, 0, 0, CMD_COMPARE, ""},
    {"--requests", "N", "", INT, AT(n_requests), 1, 1e6, CMD_COMPARE,
     "how many (CPU 64, GPU 256; a trace: all)"},
    {"--rate", "R|inf", "inf", REAL, AT(rate), 0.001, 1e9, CMD_COMPARE,
     "arrivals per second; inf: all at once, a trace as recorded"},
    {"--burstiness", "X", "1", REAL, AT(burstiness), 0.01, 100, CMD_COMPARE,
     "shape of the gamma gaps: 1 Poisson, less is burstier"},
    {"--trace", "FILE", "", TEXT, AT(trace), 0, 0, CMD_COMPARE,
     "TIMESTAMP,ContextTokens,GeneratedTokens or arrival_s,prompt_tokens,output_tokens"},
    {"\nScheduler", "", "", HEADING, 0, 0, 0, CMD_COMPARE, ""},
    {"--policy", "LIST", "static,bucketed,continuous", TEXT, AT(policy), 0, 0, CMD_COMPARE,
     "which of them; always in this order"},
    {"--max-batch", "N", "", INT, AT(max_batch), 1, 32768, CMD_COMPARE,
     "sequences at once (CPU 8, GPU 32)"},
    {"--max-input-len", "N", "", INT, AT(max_input_len), 1, 1e6, CMD_COMPARE,
     "longer prompts are rejected (default: none)"},
    {"--max-new-tokens", "N", "", INT, AT(max_new_tokens), 1, 1e6, CMD_COMPARE,
     "longer outputs are rejected"},
    {"--max-total-tokens", "N", "", INT, AT(max_total_tokens), 1, 1e9, CMD_COMPARE,
     "of all that run together, prompt and output; a longer request is rejected"},
    {"--kv-tokens", "N", "", INT, AT(kv_tokens), 16, 1e9, CMD_COMPARE,
     "pretend the KV pool is smaller"},
    {"--kv-watermark", "PCT", "1", REAL, AT(kv_watermark_pct), 0, 90, CMD_COMPARE,
     "share of the pool kept free when one is admitted"},
    {"--batch-wait", "S", "0.5", REAL, AT(batch_wait_s), 0.001, 1e6, CMD_COMPARE,
     "static: how long an incomplete batch waits"},
    {"--timeout", "S", "", REAL, AT(timeout_s), 0.001, 1e6, CMD_COMPARE,
     "drop what is not done this long after its arrival"},
    {"\nRecommendation", "", "", HEADING, 0, 0, 0, CMD_REPORT, ""},
    {"--slo-ttft", "MS", "", REAL, AT(rules.slo_ttft_ms), 0.001, 1e9, CMD_REPORT, "longest TTFT"},
    {"--slo-tpot", "MS", "", REAL, AT(rules.slo_tpot_ms), 0.001, 1e9, CMD_REPORT, "longest TPOT"},
    {"--percentile", "50|95|99", "95", CHOICE, AT(percentile), 0, 0, CMD_REPORT, "judges latency"},
    {"--min-gain", "PCT", "10", REAL, AT(rules.min_gain_pct), 0.1, 100, CMD_CURVE,
     "less throughput gained per doubling of the batch is a plateau"},
    {"--watermark", "PCT", "90", REAL, AT(rules.watermark_pct), 1, 100, CMD_CURVE,
     "share of the memory that may be used"},
    {"\nText", "", "", HEADING, 0, 0, 0, CMD_COMPARE | CMD_GENERATE, ""},
    {"--prompt", "TEXT", "", PROMPT, 0, 1, MAX_PROMPTS, CMD_GENERATE,
     "text to continue; repeatable"},
    {"--prompts", "FILE", "", TEXT, AT(prompts_file), 0, 0, CMD_COMPARE | CMD_GENERATE,
     "prompts, one a line, 256 at most"},
    {"--temperature", "X", "", REAL, AT(temperature), 0, 10, CMD_COMPARE | CMD_GENERATE,
     "0: likeliest token (generate 0, compare 1)"},
    {"--json", "", "", FLAG, AT(json), 0, 0, CMD_GENERATE, "an object per prompt"},
    {"\nOutput", "", "", HEADING, 0, 0, 0, CMD_ALL, ""},
    {"--out", "DIR", "plots", TEXT, AT(out), 0, 0, CMD_REPORT, "for CSV, JSON, PNG"},
    {"--quiet", "", "", FLAG, AT(quiet), 0, 0, CMD_ALL, "no progress line"},
    {"--help", "", "", FLAG, AT(help), 0, 0, CMD_ALL, "this text"},
    {"--version", "", "", FLAG, AT(version), 0, 0, CMD_ALL, "the version"},
};
#undef AT
enum { N_OPTIONS = sizeof option_table / sizeof option_table[0] };

static void print_help(FILE* f, int commands) {
  fputs(
      "bs measures how batch size trades memory and latency for throughput in LLM inference.\n\n"
      "bs [sweep]   measure batch 1,2,4,...: the curve, its knee, a config\n"
      "bs compare   one stream of requests through static, bucketed, continuous batching\n"
      "bs generate  continue prompts, all of them in one batch\n"
      "bs plan      the arithmetic and the predicted curve for a GPU that is not here\n"
      "bs knee FILE the working point of measurements: our CSV, vLLM's, llama-batched-bench's\n"
      "bs COMMAND --help lists only what it uses; --option=VALUE works too.\n",
      f);
  for (const Option* opt = option_table; opt < option_table + N_OPTIONS; opt++) {
    const char* format = *opt->def ? "  %-18s %-21s %s (default %s)\n" : "  %-18s %-21s %s\n";
    if (commands != 0 && !(opt->commands & commands)) continue;
    fprintf(f, opt->type == HEADING ? "%s\n" : format, opt->name, opt->arg, opt->help, opt->def);
  }
  fputs(
      "\nTTFT = first token - arrival, queueing included. E2E = last token - arrival.\n"
      "ITL = each gap between consecutive tokens, pooled over the requests.\n"
      "TPOT = (E2E - TTFT) / (output tokens - 1), of requests with two output tokens or more.\n"
      "tok/s = output tokens / (last finish - first arrival); per user: 1 / TPOT.\n"
      "Percentiles are interpolated linearly on the sorted values.\n"
      "compare: goodput = requests/s within --slo-ttft and --slo-tpot; slots% = share of slots x\n"
      "time that work for an unfinished request; pad% = share of computed tokens that nobody\n"
      "wanted; KV idle% = share of reserved cache positions that never held a request's token.\n"
      "Exit status: 0 done, 1 failed while running, 2 bad usage, 130 interrupted.\n",
      f);
}

// The place of text in "a|b|c"; -1 = not in it.
static int choice_index(const char* choices, const char* text) {
  for (int i = 0;; i++) {
    size_t n = strcspn(choices, "|");
    if (n == strlen(text) && strncmp(choices, text, n) == 0) return i;
    if (choices[n] == '\0') return -1;
    choices += n + 1;
  }
}

// The numbers in "1,2,4", which must ascend; 0 = bad. Only a LIST has more than one. Stricter than
// strtod: no space, sign, hex, exponent, inf or nan.
static int parse_numbers(const char* text, const Option* opt, double* values) {
  const char* digits = opt->type == REAL || opt->type == SIZE ? "0123456789." : "0123456789";
  for (int n = 0; n < (opt->type == LIST ? MAX_BATCHES : 1); text++) {
    char* end;
    double value = strtod(text, &end);
    size_t length = strspn(text, digits);
    if (length == 0 || end != text + length) return 0;
    if (opt->type == SIZE) value *= *end == 'M' ? 0x1p20 : *end == 'G' ? 0x1p30 : 0;
    end += opt->type == SIZE;  // past the unit; without one the value is 0 and refused
    if (!(value >= opt->lo && value <= opt->hi) || (n > 0 && value <= values[n - 1])) return 0;
    values[n++] = value;
    text = end;
    if (*text != ',') return *text == '\0' ? n : 0;
  }
  return 0;
}

static bool set_option(Options* o, const Option* opt, const char* text, char* err) {
  void* field = (char*)o + opt->offset;
  double values[MAX_BATCHES];
  int n = opt->type <= LIST ? parse_numbers(text, opt, values) : 0;
  bool inf = opt->type == REAL && strstr(opt->arg, "|inf") && strcmp(text, "inf") == 0;
  bool ok = opt->type > LIST || n > 0 || inf;
  if (opt->type == CHOICE) ok = choice_index(opt->arg, text) >= 0;
  if (opt->type == LENGTH) ok = parse_dist(text, (Dist*)field);
  if (opt->type == LENGTH && ok)
    *(opt->offset == offsetof(Options, input) ? &o->input_text : &o->output_text) = text;
  if (opt->type == TEXT) ok = *text != '\0';
  if (opt->type == PROMPT) ok = *text != '\0' && o->n_prompts < MAX_PROMPTS;
  if (!ok && (opt->type == TEXT || opt->type == PROMPT)) {
    return say(err, ERR_LEN, "%s: %s", opt->name,
               *text ? "at most 256 of them" : "the text is empty");
  }
  if (!ok && opt->type == LENGTH)
    return say(err, ERR_LEN,
               "%s '%.80s': allowed is N, uniform:LOW-HIGH, lognormal:MEAN,SIGMA or exp:MEAN, each "
               "but N with @LONGEST; 1 to %d tokens",
               opt->name, text, MOST_TOKENS);
  if (!ok) {
    char range[80] = "";
    const char* order = opt->type == LIST ? ", ascending, at most 32 of them," : "";
    if (opt->hi > 0)
      snprintf(range, sizeof range,
               opt->hi < 1e15 ? "%s from %.9g to %.0f" : "%s from %.9g to %.9g", order, opt->lo,
               opt->hi);
    return say(err, ERR_LEN, "%s '%.80s': allowed is %s%s", opt->name, text, opt->arg, range);
  }
  if (opt->type == INT) *(int*)field = (int)values[0];
  if (opt->type == REAL) *(double*)field = inf ? 0 : values[0];
  if (opt->type == SIZE) *(uint64_t*)field = (uint64_t)values[0];
  if (opt->type == LIST) *(int*)field = n;  // the numbers follow
  for (int i = 0; i < n && opt->type == LIST; i++) ((int*)field)[i + 1] = (int)values[i];
  if (opt->type == FLAG) *(bool*)field = true;
  if (opt->type == TEXT || opt->type == CHOICE) *(const char**)field = text;
  if (opt->type == PROMPT) o->prompts[o->n_prompts++] = text;
  return true;
}

static bool cpu_can(const Options* o, char* err) {
  if (strcmp(o->matmul, "auto") != 0)
    return say(err, ERR_LEN, "--matmul %s needs a GPU: the CPU allows auto", o->matmul);
  return strcmp(o->kv, "fp8") != 0 ||
         say(err, ERR_LEN, "--kv fp8 needs a GPU: the CPU keeps its cache in fp32");
}

// Options that must agree with each other. False: err names them.
static bool check_options(Options* o, char* err) {
  char text[64];
  bool lengths =
      o->command == CMD_COMPARE || (o->input.kind <= DIST_FIXED && o->output.kind <= DIST_FIXED);
  if (!lengths)
    return say(err, ERR_LEN, "--input-len and --output-len are numbers for bs %s", o->command_name);
  o->input_len = (int)o->input.a;
  o->output_len = (int)o->output.a;
  snprintf(text, sizeof text, "%s", o->policy);
  for (char *name = text, *rest; name != NULL; name = rest) {
    if ((rest = strchr(name, ',')) != NULL) *rest++ = '\0';
    int policy = choice_index("static|bucketed|continuous", name);
    if (policy < 0 || o->policies & 1 << policy)
      return say(err, ERR_LEN,
                 "--policy '%.80s': allowed are static,bucketed,continuous, each once", o->policy);
    o->policies |= 1 << policy;
  }
  if ((o->trace || o->prompts_file) && o->input_text && o->command == CMD_COMPARE)
    return say(err, ERR_LEN,
               "--input-len: the prompts of a trace or a file have lengths of their own");
  if (o->trace && o->prompts_file)
    return say(err, ERR_LEN, "--prompts: a trace has prompts of its own");
  if (o->trace && o->output_text)
    return say(err, ERR_LEN, "--output-len: the outputs of a trace have lengths of their own");
  if (o->burstiness != 1 && (o->rate == 0 || o->trace) && o->command == CMD_COMPARE)
    return say(err, ERR_LEN, "--burstiness shapes drawn arrivals: it needs --rate, and no --trace");
  bool sim = strncmp(o->device, "sim:", 4) == 0;
  if (o->command == CMD_KNEE && !o->file) return say(err, ERR_LEN, "bs knee needs a FILE");
  if (o->command == CMD_KNEE && !(sim ? *o->model : strcmp(o->device, "auto") == 0))
    return say(err, ERR_LEN,
               "bs knee runs nothing: --device is sim:GPU, with --model, or not given");
  if (o->command == CMD_KNEE && !sim && (o->cards || o->vram || strcmp(o->kv, "fp16") != 0))
    return say(err, ERR_LEN, "--gpus, --vram and --kv are for bs knee with --device sim:GPU");
  if (o->command == CMD_PLAN && !sim)
    return say(err, ERR_LEN, "bs plan needs a GPU to plan for: --device sim:h100 or another");
  if (sim && !find_sim_gpu(o->device + 4, &sim_gpu, err)) return false;
  if (!sim && choice_index("auto|cuda|cpu", o->device) < 0)
    return say(err, ERR_LEN, "--device '%.80s': allowed is auto|cuda|cpu|sim:GPU", o->device);
  if (sim && o->command == CMD_GENERATE)
    return say(err, ERR_LEN, "bs generate needs a device that computes: %s does not", o->device);
  if (o->max_batch > 0 && o->step_tokens > 0 && o->max_batch > o->step_tokens)
    return say(err, ERR_LEN,
               "--max-batch %d needs --step-tokens of as many: everyone decodes in a step",
               o->max_batch);
  for (int i = 0; i < o->n_batches; i++)
    if (o->step_tokens > 0 && o->batches[i] > o->step_tokens)
      return say(err, ERR_LEN,
                 "--batches %d needs --step-tokens of as many: everyone decodes in a step",
                 o->batches[i]);
  if (strcmp(o->device, "cpu") == 0 && !cpu_can(o, err)) return false;
  if (o->command == CMD_GENERATE && (o->n_prompts > 0) == (o->prompts_file != NULL)) {
    return say(err, ERR_LEN, "bs generate needs either --prompt TEXT or --prompts FILE");
  }
  return true;
}

// False: err names the argument and what is allowed. With --help alone `command` is 0.
static bool parse_options(int argc, char** argv, Options* o, char* err) {
  bool seen[N_OPTIONS] = {false};
  bool named = argc > 1 && argv[1][0] != '-';
  memset(o, 0, sizeof *o);
  o->model = "";
  o->temperature = NAN;
  o->command_name = named ? argv[1] : "sweep";
  int command = choice_index(command_names, o->command_name);
  if (command < 0) return say(err, ERR_LEN, "bs %.80s: allowed is %s", argv[1], command_names);
  for (int i = 0; i < N_OPTIONS; i++) {
    const Option* opt = &option_table[i];
    if (*opt->def && !set_option(o, opt, opt->def, err)) return false;
  }
  for (int i = named ? 2 : 1; i < argc; i++) {
    char* name = argv[i];
    if (1 << command == CMD_KNEE && name[0] != '-' && !o->file) {
      o->file = name;
      continue;
    }
    char* value = strchr(name, '=');
    if (value) *value++ = '\0';
    int at = 0;
    while (at < N_OPTIONS && strcmp(name, option_table[at].name) != 0) at++;
    if (at == N_OPTIONS) return say(err, ERR_LEN, "unknown option '%.80s': see bs --help", name);
    const Option* opt = &option_table[at];
    bool flag = opt->type == FLAG;
    if (!flag && !value && i + 1 < argc && strncmp(argv[i + 1], "--", 2) != 0) value = argv[++i];
    if (flag == (value != NULL)) return say(err, ERR_LEN, "write it as %s %s", name, opt->arg);
    if (seen[at] && opt->type != PROMPT) return say(err, ERR_LEN, "%s is given twice", name);
    seen[at] = true;
    if (strcmp(name, "--percentile") == 0) o->percentile_given = true;
    if (!set_option(o, opt, value, err)) return false;
    bool applies = opt->commands & 1 << command;
    if (!applies) return say(err, ERR_LEN, "%s is not for bs %s", name, o->command_name);
  }
  o->rules.percentile = atoi(o->percentile);
  o->command = named || !o->help ? 1 << command : 0;
  if (o->help || o->version) return true;
  return check_options(o, err);
}
