/* The smallest C program on the installed package: loads a model, reads a prompt, prints the answer
 * as it comes.   hello MODEL PROMPT */
#include <omnikv/c_api.h>
#include <stdio.h>

static int Failed(void) {
  fprintf(stderr, "%s\n", omnikv_last_error());
  return 1;
}

static int Print(void* user, const char* text, size_t bytes) {
  (void)user;
  return fwrite(text, 1, bytes, stdout) != bytes; /* ends the answer */
}

int main(int argc, char** argv) {
  const char* const role = "user";
  omnikv_options* options = NULL;
  omnikv_engine* engine = NULL;
  omnikv_session* session = NULL;
  int32_t* tokens = NULL;
  size_t n = 0;
  if (argc != 3) {
    fprintf(stderr, "usage: %s MODEL PROMPT\n", argv[0]);
    return 2;
  }
  if (omnikv_options_new(&options) != OMNIKV_OK ||
      omnikv_options_set(options, "model", argv[1]) != OMNIKV_OK ||
      omnikv_engine_load(options, NULL, NULL, &engine) != OMNIKV_OK ||
      omnikv_session_new(engine, NULL, &session) != OMNIKV_OK ||
      omnikv_engine_chat_prompt(engine, &role, (const char* const*)&argv[2], 1, &tokens, &n) !=
          OMNIKV_OK ||
      omnikv_session_prompt(session, tokens, n, NULL, NULL) != OMNIKV_OK ||
      omnikv_session_generate(session, NULL, Print, NULL, NULL, NULL, NULL) != OMNIKV_OK) {
    return Failed();
  }
  putchar('\n');
  omnikv_free(tokens);
  omnikv_session_free(session);
  omnikv_engine_free(engine);
  omnikv_options_free(options);
  return 0;
}
