(() => {
  const report = [...document.querySelectorAll(".tpu-report")].pop();
  const tools = report.querySelector(".tools");
  if (!tools) return;
  const programs = [...report.querySelectorAll("details.program")];
  const input = tools.querySelector("input"), button = tools.querySelector("button");
  const [kind, order] = tools.querySelectorAll("select"), output = tools.querySelector("output");
  const filter = () => {
    const wanted = input.value.toLowerCase();
    let shown = 0;
    for (const p of programs) {
      const isKind = !kind.value || p.dataset.kind.split(" ").includes(kind.value);
      p.hidden = !isKind || !p.textContent.toLowerCase().includes(wanted);
      shown += !p.hidden;
    }
    const all = programs.length, noun = all === 1 ? "program" : "programs";
    output.textContent = shown === all ? `${all} ${noun}` : `${shown} of ${all} ${noun}`;
  };
  input.addEventListener("input", filter);
  kind.addEventListener("change", filter);
  order.addEventListener("change", () => {
    const by = order.value, sign = by === "number" ? 1 : -1;
    const sorted = [...programs].sort((a, b) => sign * (a.dataset[by] - b.dataset[by]));
    programs[0].parentNode.append(...sorted);
  });
  button.addEventListener("click", () => {
    const open = programs.some((p) => !p.open && !p.hidden);
    for (const p of programs) p.open = open && !p.hidden;
    button.textContent = open ? "Close all" : "Open all";
  });
  const target = () => {
    const found = programs.find((p) => `#${p.id}` === location.hash);
    if (found) [found.open, found.hidden] = [true, false];
  };
  addEventListener("hashchange", target);
  target();
})();
