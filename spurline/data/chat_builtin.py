"""Built-in chat templates, for tokenizers whose folder has none. Torch-free.

All of them mark the assistant's text with {% generation %}, and end each turn with a fixed text.
"""

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
{{- '\\n' }}
{%- else %}
{{- message['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """\
{{- bos_token | default('') }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}
{%- else %}
{{- message['content'] | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

# For tokenizers without special tokens for turns, such as bytes.
PLAIN = """\
{%- for message in messages %}
{{- '### ' + message['role'] | capitalize + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}
{{- '\\n' }}
{%- else %}
{{- message['content'] + '<|end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '### Assistant\\n' }}{% endif %}"""

BUILT_IN = {"chatml": CHATML, "llama3": LLAMA3, "plain": PLAIN}
