(() => {
  const report = [...document.querySelectorAll(".tpu-report")].pop();
  const tools = report.querySelector(".tools");
  if (!tools) return;
  const programs = [...report.querySelectorAll("details.program")];
  const input = tools.querySelector("input"), button = tools.querySelector("button");
  input.addEventListener("input", () => {
    const wanted = input.value.toLowerCase();
    for (const p of programs) p.hidden = !p.textContent.toLowerCase().includes(wanted);
  });
  button.addEventListener("click", () => {
    const open = programs.some((p) => !p.open && !p.hidden);
    for (const p of programs) p.open = open && !p.hidden;
    button.textContent = open ? "Close all" : "Open all";
  });
})();
